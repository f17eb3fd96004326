"""The smoothing that TensorBoard's users know."""

from __future__ import annotations

import math

import numpy as np

from rankscope.dashboard.figures.arrays import Float64


def smooth(values: Float64, weight: float) -> Float64:
    """Exponential moving average, freed of its start-up bias.

    `m <- w m + (1 - w) x`, shown as `m / (1 - w^n)` with n finite values so far. Values that are
    not finite pass through and are not counted; a constant series stays as it is, to the last bit.

    Source: TensorBoard, `data_transformer.ts`, `resmooth`.

    Args:
        values: float64 [N].
        weight: 0 (no smoothing) up to, not including, 1.

    Returns:
        float64 [N].

    Raises:
        ValueError: the weight is outside of [0, 1).
    """
    if not 0.0 <= weight < 1.0:
        raise ValueError(f"a smoothing weight is at least 0 and below 1, not {weight}")
    finite = values[np.isfinite(values)]
    if weight == 0.0 or not finite.size or bool((finite == finite[0]).all()):
        return values.copy()
    result = np.empty_like(values)
    last, count = 0.0, 0
    for i, value in enumerate(values.tolist()):
        if not math.isfinite(value):
            result[i] = value
            continue
        last = weight * last + (1.0 - weight) * value
        count += 1
        result[i] = last / (1.0 - weight**count)
    return result
