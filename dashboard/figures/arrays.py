"""What figures are drawn from. Shapes: R ranks, S steps, N points of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

_NO_STEPS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric of one rank.

    Attributes:
        steps: int64 [N], ascending.
        values: float64 [N]: raw values, or means of buckets of steps.
        minimum, maximum: float64 [N] where the values are buckets, else None.
    """

    rank: int
    steps: Int64
    values: Float64
    minimum: Float64 | None = None
    maximum: Float64 | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """An alert on the step axis.

    Attributes:
        id: of the alert; comes back as the annotation's name when it is clicked.
        last_step: None draws the first step only, without the span.
        severity: `info`, `warning` or `critical`.
    """

    id: str
    severity: str
    title: str
    first_step: int
    last_step: int | None = None


def align(curves: Sequence[Curve]) -> tuple[Int64, Float64, Float64, Float64]:
    """Curves on their common steps.

    Returns:
        Steps int64 [S], then values, minima and maxima, float64 [R, S]: NaN where a rank has no
        point; minima and maxima are the values themselves where the data are not buckets.
    """
    first = curves[0].steps if curves else _NO_STEPS
    if curves and all(c.steps is first or np.array_equal(first, c.steps) for c in curves[1:]):
        # Ranks go in step, nearly always, and mostly share the array.
        values = np.stack([c.values for c in curves])
        if all(c.minimum is None for c in curves):
            return first, values, values, values
        low = np.stack([c.values if c.minimum is None else c.minimum for c in curves])
        high = np.stack([c.values if c.maximum is None else c.maximum for c in curves])
        return first, values, low, high
    steps = np.unique(np.concatenate([c.steps for c in curves] or [_NO_STEPS]))
    parts = np.full((3, len(curves), len(steps)), np.nan)
    for row, curve in enumerate(curves):
        columns = np.searchsorted(steps, curve.steps)
        parts[0, row, columns] = curve.values
        parts[1, row, columns] = curve.values if curve.minimum is None else curve.minimum
        parts[2, row, columns] = curve.values if curve.maximum is None else curve.maximum
    return steps.astype(np.int64), parts[0], parts[1], parts[2]


def rank_list(ranks: Sequence[int]) -> str:
    """Ranks as a person writes them: `0, 2-5, 9`."""
    parts: list[str] = []
    ordered = sorted(set(ranks))
    start = 0
    for i, rank in enumerate(ordered):
        if i + 1 == len(ordered) or ordered[i + 1] != rank + 1:
            first = ordered[start]
            parts.append(f"{first}" if first == rank else f"{first}-{rank}")
            start = i + 1
    return ", ".join(parts)
