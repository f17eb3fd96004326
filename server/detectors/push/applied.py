"""What a parameter server says of the pushes that it applied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rankscope.server.detectors.mechanisms.series_by_step import rows_by_step
from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.window import Window

SERIES = ("push_worker", "push_staleness")


@dataclass(frozen=True, slots=True)
class Push:
    """One gradient that was applied.

    Attributes:
        version: that it made: the step of the record.
        worker: rank that pushed it.
        staleness: versions that had been made since the one it was computed on.
    """

    version: int
    worker: int
    staleness: int

    @property
    def computed_on(self) -> int:
        """The version that its worker had pulled."""
        return self.version - 1 - self.staleness


def pushes(window: Window) -> Iterator[Push]:
    """All pushes of a window, in the order in which they were applied."""
    steps, workers = rank_rows(window, SERIES[0])
    staleness = rows_by_step(window, SERIES[1])
    for step, row in zip(steps.tolist(), workers, strict=True):
        lags = staleness.get(step)
        for column in np.flatnonzero(np.isfinite(row)).tolist():
            if lags is not None and np.isfinite(lags[column]):
                yield Push(step, int(row[column]), int(lags[column]))
