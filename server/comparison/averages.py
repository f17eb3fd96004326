"""Whether the parameters that ranks hold after an average are the mean of what they held before.

Each rank reports by how much its tensors have changed between two steps. An average takes every
rank to the mean of all, so that these changes add up to zero over the ranks: it moves parameters
between ranks and adds nothing. That holds for averages of pairs and of rings as well, and whatever
the ranks have learned for themselves meanwhile. Sketches are linear, so that it holds for them too.

Where all ranks hold A = sum of w_r p_r afterwards (sum of w_r = 1) instead of the mean M, the
change of rank r is C_r = A - p_r, and the mean change is E = A - M = sum of (w_r - 1/N) (p_r - M),
with p_r - M = E - C_r: least squares gives the weights. Pure.

Shapes: R ranks of one replica class, T tensors, K buckets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from rankscope.agent import wire
from rankscope.server.window import Average, Float64

STAGE = "average"
# Ranks whose weights are looked for: with as many as equations everything is explained.
_MAX_RANKS = 256
# Singular values that are zero, relative: the deviations from the mean add up to zero.
_SINGULAR = 1e-6


def averaged(
    step: int,
    members: Sequence[int],
    changes: Mapping[int, Mapping[str, wire.Fingerprint]],
) -> Average | None:
    """What became of the mean of the parameters before a step; None where not all have reported it.

    Args:
        members: ranks that hold replicas.
        changes: by rank and table.
    """
    stacked = _stacked(members, changes)
    if stacked is None:
        return None
    ranks = tuple(members)
    size = math.sqrt(float((stacked**2).sum()) / len(ranks))
    if not (math.isfinite(size) and size > 0):
        return None
    moved = stacked.mean(axis=0)
    deviations = moved - stacked
    share = float(np.linalg.norm(moved)) / size
    if len(ranks) > _MAX_RANKS or len(moved) < 2 * len(ranks):
        return Average(step=step, ranks=ranks, share=share)
    odd, *_ = np.linalg.lstsq(deviations.T, moved, rcond=_SINGULAR)
    left = float(np.linalg.norm(moved - deviations.T @ odd)) / size
    weights = tuple((1.0 / len(ranks) + odd).tolist())
    return Average(step=step, ranks=ranks, share=share, weights=weights, left=left)


def _stacked(
    members: Sequence[int], changes: Mapping[int, Mapping[str, wire.Fingerprint]]
) -> Float64 | None:
    """Sketches of all tensors of the ranks, [R, T * K]."""
    rows: list[Float64] = []
    for rank in members:
        of_rank = changes.get(rank)
        if not of_rank:
            return None
        made = next(iter(of_rank.values()))
        if made.sketches is None or (rows and made.sketches.size != len(rows[0])):
            return None
        rows.append(made.sketches.astype(np.float64).ravel())
    return np.stack(rows) if len(rows) > 1 else None
