"""How near what came out of a reduction is to the mean of what went in, where it need not be it.

Of a reduction that sends approximations (a communication hook that compresses), by sketches alone.

Shapes: R ranks of one replica class, T tensors, K buckets.
"""

from __future__ import annotations

import numpy as np

from rankscope.server.window import Float64


def cosine(local: Float64, reduced: Float64) -> float:
    """Cosine of what came out to the mean of what went in; NaN where one is zero or unknown.

    Args:
        local: float64 [R, T, K]; a tensor of which a rank's sketch is not known does not count.
        reduced: float64 [T, K].
    """
    mean = local.mean(axis=0)
    known = np.isfinite(mean).all(axis=1) & np.isfinite(reduced).all(axis=1)
    one, other = mean[known], reduced[known]
    size = float(np.sqrt((one**2).sum() * (other**2).sum()))
    return float((one * other).sum()) / size if size > 0 else float("nan")


def kept(local: Float64, reduced: Float64, ratio: float) -> float:
    """Norm of what came out over that of the mean of what went in, without their common factor.

    NaN where one of them is zero or unknown.

    Args:
        local: float64 [R, T, K]; a tensor of which a rank's sketch is not known does not count.
        reduced: float64 [T, K].
        ratio: the factor.
    """
    mean = local.mean(axis=0)
    known = np.isfinite(mean).all(axis=1) & np.isfinite(reduced).all(axis=1)
    before, after = _norm(ratio * mean[known]), _norm(reduced[known])
    return after / before if before > 0 else float("nan")


def emptied(local: Float64, reduced: Float64, before: Float64 | None) -> int:
    """Number of tensors with elements that went in and came out as zeros, and did not before.

    A bucket of a sketch is exactly zero where all its elements are. Tensors of zeros alone do not
    count, and neither do elements that are always zero, as a mask of pruned weights leaves them.

    Args:
        local: float64 [R, T, K].
        reduced: float64 [T, K].
        before: the same of the sampled step before; None for none.
    """
    if before is None or before.shape != reduced.shape:
        return 0
    went_in = (local != 0).any(axis=0)
    lost = (went_in & (reduced == 0) & (before != 0)).any(axis=1)
    return int((lost & (reduced != 0).any(axis=1)).sum())


def _norm(vector: Float64) -> float:
    return float(np.sqrt((vector**2).sum()))
