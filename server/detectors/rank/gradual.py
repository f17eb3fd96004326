"""Whether a rank's loss came away from the others' at once or little by little."""

from __future__ import annotations

import numpy as np

from rankscope.server.detectors.mechanisms.history import RankHistory
from rankscope.server.detectors.mechanisms.statistics import others_median
from rankscope.server.window import Float64, Int64

# Observations on either side of the onset of which the median is taken: 8 scatter a third as much
# as one.
_BESIDE = 8
# The distance before the onset and after it, as shares of what it has come to: between these a
# fault that is there or not would leave neither.
_BEFORE, _AFTER = 0.2, 0.7


def came_gradually(losses: RankHistory, known: Int64, rank: int, onset: int) -> bool:
    """Whether the distance was there in part before the onset, or not yet in full after it.

    The distance is that of the logarithms: losses fall. What a program does to one rank's batches
    it does to the first one as to all that follow; samples that are easier than the others' are
    learned sooner, and that takes its time.

    Args:
        losses: all that are remembered.
        known: of the ranks, int64 [R].
        onset: first step at which the rank is held to be an outlier.
    """
    steps, matrix = losses.steps(), losses.matrix(known)
    distance = _log(matrix)[:, int(np.searchsorted(known, rank))]
    there = np.isfinite(distance)
    steps, distance = steps[there], distance[there]
    at = int(np.searchsorted(steps, onset))
    if at < _BESIDE or len(distance) < at + 2 * _BESIDE:
        return False
    now = float(np.median(distance[-_BESIDE:]))
    if not now:
        return False
    before = float(np.median(distance[at - _BESIDE : at])) / now
    after = float(np.median(distance[at : at + _BESIDE])) / now
    return before > _BEFORE or after < _AFTER


def _log(losses: Float64) -> Float64:
    """The logarithms over the median of the other ranks' [N, R]; NaN of what is not > 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = np.where(losses > 0, np.log(losses), np.nan)
    return logs - others_median(logs)
