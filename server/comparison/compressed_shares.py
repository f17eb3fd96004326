"""What each rank's gradient has of a reduction whose result is no sum of them, by sketches. Pure.

Compressed gradients with error feedback (Stich, Cordonnier and Jaggi 2018) send a part of each
rank's gradient, and the rest in later steps: what comes out of one step is a sum of parts of this
step's gradients and of earlier ones. What is a rank's own in this step's gradient, its noise, is in
nothing else, so that least squares finds how much of it has come out; the same compression on all
ranks takes the same share of each. A rank that is added twice has twice that share, one that is
lost none. Single steps are inexact, the mean over some is not.
"""

from __future__ import annotations

import numpy as np

from rankscope.server.comparison import rank_weights as weighing
from rankscope.server.window import Float64

# Ranks that are solved for: the work of a step grows with the third power.
_MOST = 64
# Equations for each unknown, at the least.
_SPARE = 8


def of_ranks(local: Float64, reduced: Float64) -> tuple[float, ...]:
    """Coefficients of the ranks' gradients in what came out; empty where they cannot be known.

    Tensors count alike: each is taken as a multiple of the size of what went in.

    Args:
        local: float64 [R, T, K].
        reduced: float64 [T, K].
    """
    known = np.isfinite(local).all(axis=(0, 2)) & np.isfinite(reduced).all(axis=1)
    sizes = np.sqrt((local**2).sum(axis=2)).mean(axis=0)
    known &= sizes > 0
    basis = (local[:, known] / sizes[known, None]).reshape(len(local), -1)
    target = (reduced[known] / sizes[known, None]).reshape(-1)
    used = (basis != 0).any(axis=0)
    if len(local) > _MOST or used.sum() < _SPARE * len(local):
        return ()
    found, errors = weighing.solve(basis[:, used], target[used])
    return tuple(found.tolist()) if np.isfinite(errors).all() else ()
