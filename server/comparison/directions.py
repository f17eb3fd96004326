"""Where the ranks' own gradients point, beside each other, by sketches alone.

Sketches are linear and keep inner products: their estimate has a standard error of |a| |b| over the
root of the number of buckets, that of a sum over tensors less. Pure.
"""

from __future__ import annotations

import numpy as np

from rankscope.server.window import Float64, GradientProducts, Int64


def of_gradients(step: int, ranks: Int64, sketches: Float64) -> GradientProducts:
    """Inner products of each rank's gradient with the mean of the others', of two ranks or more.

    Args:
        sketches: float64 [R, T, K]; a tensor of which a rank's is not known does not count.
    """
    known = np.isfinite(sketches).all(axis=(0, 2))
    flat = sketches[:, known].reshape(len(ranks), -1)
    squares = np.einsum("rm,rm->r", flat, flat)
    whole = np.add.reduce(np.sort(flat, axis=0), axis=0)  # the same however ranks are numbered
    with_all, all_square = flat @ whole, float(whole @ whole)
    n = len(ranks) - 1
    return GradientProducts(
        step=step,
        ranks=ranks,
        squares=squares,
        products=(with_all - squares) / n,
        others=np.maximum(all_square - 2 * with_all + squares, 0.0) / n**2,
    )
