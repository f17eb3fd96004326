"""How many samples are behind a step: the mean of few scatters more than that of many."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.window import Bool, Float64, Window

# `samples` is reported at some steps only; the other two at every one, and multiply to the same.
SERIES = ("samples", "samples_per_second", "step_seconds")
# Samples below which the tails of a loss or gradient are those of single ones, which grow heavier
# as most of them are learned: what is far off again and again is no sign of anything.
SINGLE = 8.0
TOKENS = "tokens"  # posted where samples are sequences, each of many of them
_NOT_YET = -(2**62)


def effective_sizes(window: Window, metric: str) -> Float64:
    """Samples that would give a mean over ranks its scatter if every rank had as many.

    That is the harmonic mean of the ranks' batch sizes: variances go with their inverse.

    Returns:
        float64 [N], at the steps at which any rank posted `metric`, of the ranks that did; NaN
        where none of them gives a size.
    """
    series = window.series.get(metric)
    if series is None:
        return np.empty(0)
    some = np.flatnonzero(series.present.any(axis=0))
    sizes = np.where(series.present, _sizes(window), np.nan)[:, some]
    # Ranks along the last axis, as in `mean_over_ranks`: sums do not depend on how steps are cut.
    inverse = np.ascontiguousarray(1.0 / sizes.T)
    known = np.isfinite(inverse)
    count = known.sum(axis=1)
    total = np.add.reduce(np.where(known, inverse, 0.0), axis=1)
    effective = np.full(len(some), np.nan)
    np.divide(count, total, out=effective, where=count > 0)
    return effective


def _sizes(window: Window) -> Float64:
    """Batch sizes, float64 [R, S]; NaN where a rank does not report."""
    sizes = np.full((len(window.ranks), len(window.steps)), np.nan)
    rate, seconds = (window.series.get(name) for name in SERIES[1:])
    if rate is not None and seconds is not None:
        both = rate.present & seconds.present
        sizes[both] = np.rint(rate.values[both] * seconds.values[both])
    reported = window.series.get(SERIES[0])
    if reported is not None:
        sizes[reported.present] = reported.values[reported.present]
    sizes[~((sizes >= 1) & np.isfinite(sizes))] = np.nan
    return sizes


def whole_batches(window: Window) -> Float64:
    """Samples of a step, of all ranks that share a batch, and the number of these.

    Returns:
        float64 [2, S]; NaN where one of them does not report its own.
    """
    found = np.full((2, len(window.steps)), np.nan)
    sizes = _sizes(window)
    reported = np.isfinite(sizes)
    there = _taking_part(window) | reported
    # Each set reads the whole batch, and there may be some that see nothing of it (pipelines).
    for group in reversed(window.data_parallel):
        rows = np.isin(window.ranks, group)
        whole = (reported[rows] | ~there[rows]).all(axis=0) & there[rows].any(axis=0)
        total = np.add.reduce(np.ascontiguousarray(np.where(reported, sizes, 0.0)[rows].T), axis=1)
        found[:, whole] = np.stack([total, there[rows].sum(axis=0)])[:, whole]
    return found


def _taking_part(window: Window) -> Bool:
    """Which ranks train at which steps, bool [R, S].

    Not the ranks of today's world: a finished run is evaluated again as it was.
    """
    last = {life.rank: life.last_step for life in window.liveness}
    ranks = window.ranks.tolist()
    until = np.array([last.get(rank, -1) for rank in ranks], dtype=np.int64)
    there: Bool = until[:, None] >= window.steps
    begins = window.begins.values()
    first = window.steps[0] if len(window.steps) else 0
    if all(len(own) < 2 and max(own, default=-1) <= first for own in begins):
        return there
    # By how many processes of its own each rank has come to a step; of one that has said nothing
    # of when it began, that is not known.
    begun = np.zeros((len(ranks), len(window.steps)), dtype=np.int64)
    for row, rank in enumerate(ranks):
        own = np.array(window.begins.get(rank) or (-1,), dtype=np.int64)
        newest = np.searchsorted(own, window.steps, side="right") - 1
        begun[row] = np.where(newest >= 0, own[newest], _NOT_YET)
    there &= begun != _NOT_YET
    # Where half of the ranks began anew without it, it did not come along.
    for column in np.flatnonzero((begun != begun[:1]).any(axis=0)).tolist():
        at = np.maximum(begun[:, column], -1)
        later = len(at) - np.searchsorted(np.sort(at), at, side="right")
        there[:, column] &= (later == 0) | (2 * later < len(at))
    return there


def first_tokens(window: Window) -> float:
    """First step of a window at which samples were said to be sequences; infinite for none."""
    series = window.series.get(TOKENS)
    if series is None:
        return math.inf
    there = np.flatnonzero(series.present.any(axis=0))
    return float(window.steps[there[0]]) if len(there) else math.inf


@dataclass(slots=True)
class BatchSizes:
    """What is usual, and what a step of fewer samples is forgiven.

    Attributes:
        recent: sizes of the last steps that reported one.
    """

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=64))

    def push(self, size: float) -> None:
        """Takes what `effective_sizes` says of the next step."""
        if math.isfinite(size):
            self.recent.append(size)

    def widening(self, size: float) -> float:
        """Times that the scatter of a mean of this many samples is the usual one.

        With the root of their number. 1 for more than usual, since what differs from step to step
        is not the samples alone, and where nothing is known.
        """
        return math.sqrt(max(self.usual / size, 1.0)) if math.isfinite(size) else 1.0

    @property
    def usual(self) -> float:
        """Median of the last sizes; NaN for none."""
        return float(np.median(self.recent)) if self.recent else math.nan
