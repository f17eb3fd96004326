"""The data ledger of a run, out of the database."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from sqlalchemy import Connection

from rankscope.server.comparison.ledger import Ledger, ledger
from rankscope.server.storage.reading import batches, series

# Batches that are gone through: 1,000 steps of 100 ranks. Of more the newest are.
_MOST = 100_000
_POINTS = 200


class BatchSize(NamedTuple):
    """Samples in the batches of a rank; the typical one is the median of means of few steps."""

    least: float
    typical: float
    most: float


@dataclass(frozen=True, slots=True)
class DataRead:
    """What the ranks of a run read.

    Attributes:
        ledger: None where no rank has reported batches.
        complete: whether it is of all steps that were asked for; else of the newest of them.
        sizes: of the batches, by rank, where they are reported.
    """

    ledger: Ledger | None
    complete: bool
    sizes: dict[int, BatchSize]


def read_data(
    connection: Connection, *, run: int, from_step: int | None = None, to_step: int | None = None
) -> DataRead:
    """What the ranks of a run read over a range of steps, both ends included."""

    def curves(metric: str) -> list[series.RankSeries]:
        return series.read_series(
            connection,
            run=run,
            metric=metric,
            from_step=from_step,
            to_step=to_step,
            max_points=_POINTS,
        )

    read = batches.read_batches(
        connection, run=run, most=_MOST, from_step=from_step, to_step=to_step
    )
    lengths = [float(c.high.max()) for c in curves("loader_batches")]
    found = ledger(read, epoch=max(lengths, default=math.nan)) if len(read.ranks) else None
    sizes = {
        c.rank: BatchSize(float(c.low.min()), float(np.median(c.values)), float(c.high.max()))
        for c in curves("samples")
    }
    return DataRead(found, read.complete, sizes)
