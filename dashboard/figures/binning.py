"""Many checked steps on few columns: the worst cell of each column survives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankscope.dashboard.figures.arrays import Bool, Float64, Int64

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Bins:
    """Ranks x columns, each column `width` consecutive steps.

    Attributes:
        starts: int64 [C], first step of each column; columns without a checked step are there too.
        checked: bool [R, C].
        differs: bool [R, C].
        relative: float64 [R, C]: largest known relative distance; NaN where none is known.
    """

    width: int
    starts: Int64
    checked: Bool
    differs: Bool
    relative: Float64


def bin_steps(
    steps: Int64, relative: Float64, checked: Bool, *, columns: int, span: tuple[int, int]
) -> Bins:
    """Cuts the steps of `span` into at most `columns` columns of equal width.

    The width is 1, 2 or 5 times a power of ten, and columns start at multiples of it: appending
    steps does not move the cells that are already there, until the width has to grow.

    Args:
        steps: int64 [S].
        relative: float64 [R, S]: 0 for equal bits, NaN for a distance that is not known.
        checked: bool [R, S].
        columns: at most this many.
        span: first and last step, both included.
    """
    first, last = span
    width = 1
    factors = (2.0, 2.5, 2.0)
    round_ = 0
    while last // width - first // width + 1 > columns:
        width = round(width * factors[round_ % 3])
        round_ += 1
    starts = np.arange(first // width, last // width + 1, dtype=np.int64) * width
    shape = (relative.shape[0], len(starts))
    inside = (steps >= first) & (steps <= last)
    column = (steps[inside] // width) - first // width
    relative, checked = relative[:, inside], checked[:, inside]
    differs = checked & (np.isnan(relative) | (relative > 0))

    # Columns ascend as the steps do, so each is one stretch of them.
    edges = np.flatnonzero(np.diff(column, prepend=-1))

    def worst(cells: Array, empty: float) -> Array:
        result = np.full(shape, empty, cells.dtype)
        if edges.size:
            result[:, column[edges]] = np.maximum.reduceat(cells, edges, axis=1)
        return result

    sized = worst(np.where(differs & ~np.isnan(relative), relative, -np.inf), -np.inf)
    return Bins(
        width=width,
        starts=starts,
        checked=worst(checked, False),
        differs=worst(differs, False),
        relative=np.where(np.isfinite(sized), sized, np.nan),
    )
