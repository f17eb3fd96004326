"""`GET /runs/{run}/data`: what each rank read."""

from __future__ import annotations

import numpy as np
from fastapi import APIRouter
from pydantic import BaseModel, Field

from rankscope.server.api.deps import Database, RunId, Step, known_run
from rankscope.server.comparison.ledger import CLASSES, Ledger
from rankscope.server.evaluation.data_ledger import DataRead, read_data
from rankscope.server.storage.database.engine import reading

router = APIRouter(tags=["series"])

# Pairs of ranks that are listed: those that share most.
_PAIRS = 100


class BatchSize(BaseModel):
    """Samples in a rank's batches."""

    least: float
    typical: float
    most: float


class RankData(BaseModel):
    """What one rank read, of the samples that were identified."""

    rank: int
    batch_size: BatchSize | None = Field(description="null where the rank does not report it")
    batches: int = Field(description="batches that are known")
    same_step: int = Field(description="of these, batches that another rank read at the same step")
    new: int = Field(description="samples that nobody had read before")
    earlier_pass: int = Field(description="read by somebody in an earlier pass through the data")
    own_again: int = Field(description="read by the rank itself before, in the same pass")
    other_rank: int = Field(description="read by another rank before, in the same pass")


class SharedData(BaseModel):
    """Two ranks that read the same samples."""

    ranks: list[int] = Field(description="two of them")
    share: float = Field(description="of the samples that the one with fewer read in a pass")


class Data(BaseModel):
    """What the ranks of a run read, by some samples of each batch that are known by their hashes.

    A pass is once through the data: it ends where most of what comes has come in it before. Ranks
    of one tensor- or pipeline-parallel group share their batches by design.
    """

    from_step: int | None = Field(description="first step of which batches are known; null: none")
    to_step: int | None
    complete: bool = Field(
        description="false where there are more than 100,000 batches: the newest"
    )
    identified: str | None = Field(description="`samples`; `batches` where only these are known")
    passes: list[int] = Field(description="steps at which a pass through the data begins")
    ranks: list[RankData]
    shared: list[SharedData] = Field(description="up to 100 pairs of ranks, largest share first")


@router.get("/runs/{run}/data")
def get_data(engine: Database, run: RunId, from_step: Step = None, to_step: Step = None) -> Data:
    """What each rank read: batch sizes, samples that came again, samples that two ranks had."""
    with reading(engine) as connection:
        key = known_run(connection, run).key
        found = read_data(connection, run=key, from_step=from_step, to_step=to_step)
    known = found.ledger
    if known is None:
        return Data(
            from_step=None,
            to_step=None,
            complete=True,
            identified=None,
            passes=[],
            ranks=[],
            shared=[],
        )
    return Data(
        from_step=int(known.steps[0]),
        to_step=int(known.steps[-1]),
        complete=found.complete,
        identified="samples" if known.by_samples else "batches",
        passes=list(known.passes),
        ranks=_ranks(found, known),
        shared=_shared(known),
    )


def _ranks(found: DataRead, known: Ledger) -> list[RankData]:
    return [
        RankData(
            rank=rank,
            batch_size=BatchSize(**size._asdict()) if (size := found.sizes.get(rank)) else None,
            batches=int(known.batches[row]),
            same_step=int(known.same_step[row]),
            **dict(zip(CLASSES, known.of_ranks[row].tolist(), strict=True)),
        )
        for row, rank in enumerate(known.ranks.tolist())
    ]


def _shared(known: Ledger) -> list[SharedData]:
    share = np.triu(np.nan_to_num(known.shared), 1)
    largest = np.argsort(-share, axis=None, kind="stable")[:_PAIRS]
    rows, columns = np.unravel_index(largest, share.shape)
    return [
        SharedData(ranks=[int(known.ranks[a]), int(known.ranks[b])], share=float(share[a, b]))
        for a, b in zip(rows, columns, strict=True)
        if share[a, b] > 0
    ]
