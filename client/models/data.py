"""What the ranks of a run read.

Written by docs/client_models.py (`make docs`). Do not edit by hand.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSize:
    """Samples in a rank's batches."""

    least: float
    typical: float
    most: float


@dataclass(frozen=True)
class RankData:
    """What one rank read, of the samples that were identified.

    Attributes:
        batch_size: null where the rank does not report it.
        batches: batches that are known.
        same_step: of these, batches that another rank read at the same step.
        new: samples that nobody had read before.
        earlier_pass: read by somebody in an earlier pass through the data.
        own_again: read by the rank itself before, in the same pass.
        other_rank: read by another rank before, in the same pass.
    """

    rank: int
    batch_size: BatchSize | None
    batches: int
    same_step: int
    new: int
    earlier_pass: int
    own_again: int
    other_rank: int


@dataclass(frozen=True)
class SharedData:
    """Two ranks that read the same samples.

    Attributes:
        ranks: two of them.
        share: of the samples that the one with fewer read in a pass.
    """

    ranks: list[int]
    share: float


@dataclass(frozen=True)
class Data:
    """What the ranks of a run read, by some samples of each batch that are known by their hashes.

    A pass is once through the data: it ends where most of what comes has come in it before. Ranks
    of one tensor- or pipeline-parallel group share their batches by design.

    Attributes:
        from_step: first step of which batches are known; null: none.
        complete: false where there are more than 100,000 batches: the newest.
        identified: `samples`; `batches` where only these are known.
        passes: steps at which a pass through the data begins.
        shared: up to 100 pairs of ranks, largest share first.
    """

    from_step: int | None
    to_step: int | None
    complete: bool
    identified: str | None
    passes: list[int]
    ranks: list[RankData]
    shared: list[SharedData]
