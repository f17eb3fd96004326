"""How many samples are behind a step's loss: the mean of few scatters more than that of many."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.window import Float64, Window

# `samples` is told at some steps only; the other two at every one, and multiply to the same.
SERIES = ("samples", "samples_per_second", "step_seconds")


def effective_sizes(window: Window, metric: str) -> Float64:
    """Samples that would give a mean over ranks its scatter if every rank had as many.

    That is the harmonic mean of the ranks' batch sizes: variances go with their inverse.

    Returns:
        float64 [N], at the steps at which any rank posted `metric`, of the ranks that did; NaN
        where none of them tells a size.
    """
    series = window.series.get(metric)
    if series is None:
        return np.empty(0)
    some = np.flatnonzero(series.present.any(axis=0))
    sizes = np.where(series.present, sizes_of_ranks(window), np.nan)[:, some]
    # Ranks along the last axis, as in `mean_over_ranks`: sums do not depend on how steps are cut.
    inverse = np.ascontiguousarray(1.0 / sizes.T)
    known = np.isfinite(inverse)
    count = known.sum(axis=1)
    total = np.add.reduce(np.where(known, inverse, 0.0), axis=1)
    effective = np.full(len(some), np.nan)
    np.divide(count, total, out=effective, where=count > 0)
    return effective


def sizes_of_ranks(window: Window) -> Float64:
    """Batch sizes, float64 [R, S]; NaN where a rank does not tell."""
    sizes = np.full((len(window.ranks), len(window.steps)), np.nan)
    rate, seconds = (window.series.get(name) for name in SERIES[1:])
    if rate is not None and seconds is not None:
        both = rate.present & seconds.present
        sizes[both] = np.rint(rate.values[both] * seconds.values[both])
    told = window.series.get(SERIES[0])
    if told is not None:
        sizes[told.present] = told.values[told.present]
    sizes[~((sizes >= 1) & np.isfinite(sizes))] = np.nan
    return sizes


@dataclass(slots=True)
class BatchSizes:
    """What is usual, and what a step of fewer samples is forgiven.

    Attributes:
        recent: sizes of the last steps that told one.
    """

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=64))

    def push(self, size: float) -> None:
        """Takes what `effective_sizes` says of the next step."""
        if math.isfinite(size):
            self.recent.append(size)

    def widening(self, size: float) -> float:
        """Times that the scatter of a mean of so many samples is the usual one.

        With the root of their number. 1 for more than usual, since what differs from step to step
        is not the samples alone, and where nothing is known.
        """
        return math.sqrt(max(self.usual / size, 1.0)) if math.isfinite(size) else 1.0

    @property
    def usual(self) -> float:
        """Median of the last sizes; NaN for none."""
        return float(np.median(self.recent)) if self.recent else math.nan
