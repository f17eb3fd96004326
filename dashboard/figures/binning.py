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
    steps: Int64,
    relative: Float64,
    checked: Bool,
    *,
    columns: int,
    span: tuple[int, int],
    until: Int64 | None = None,
    counts: Int64 | None = None,
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
        until: int64 [S]: each entry holds from `steps` up to here; default: for one step.
        counts: int64 [S]: how many steps of such a stretch were compared, at equal distances;
            default: all.
    """
    first, last = span
    width = 1
    factors = (2.0, 2.5, 2.0)
    round_ = 0
    while last // width - first // width + 1 > columns:
        width = round(width * factors[round_ % 3])
        round_ += 1
    low, high = first // width, last // width
    differs = checked & (np.isnan(relative) | (relative > 0))
    sized = np.where(differs & ~np.isnan(relative), relative, -np.inf)
    entries, column = _places(steps, until, counts, width, low, high)
    # Columns ascend as the steps do, so each is one stretch of them.
    edges = np.flatnonzero(np.diff(column, prepend=-1))

    def worst(cells: Array, empty: float) -> Array:
        result = np.full((relative.shape[0], high - low + 1), empty, cells.dtype)
        if edges.size:
            result[:, column[edges]] = np.maximum.reduceat(cells[:, entries], edges, axis=1)
        return result

    largest = worst(sized, -np.inf)
    return Bins(
        width=width,
        starts=np.arange(low, high + 1, dtype=np.int64) * width,
        checked=worst(checked, False),
        differs=worst(differs, False),
        relative=np.where(np.isfinite(largest), largest, np.nan),
    )


def _places(
    steps: Int64, until: Int64 | None, counts: Int64 | None, width: int, low: int, high: int
) -> tuple[Int64, Int64]:
    """Which entry falls into which column: (entry, column) pairs, by column."""
    if until is None:
        entries = np.arange(len(steps), dtype=np.int64)
        columns = steps // width
    else:
        parts = []
        for i, (start, end) in enumerate(zip(steps.tolist(), until.tolist(), strict=True)):
            number = end - start + 1 if counts is None else max(int(counts[i]), 1)
            if number * width >= end - start + 1:
                held = np.arange(max(start // width, low), min(end // width, high) + 1)
            else:
                held = np.unique(np.linspace(start, end, number).astype(np.int64) // width)
            parts.append((np.full(len(held), i), held))
        entries = np.concatenate([p[0] for p in parts] or [np.empty(0, np.int64)])
        columns = np.concatenate([p[1] for p in parts] or [np.empty(0, np.int64)])
    inside = (columns >= low) & (columns <= high)
    entries, columns = entries[inside], columns[inside] - low
    order = np.argsort(columns, kind="stable")
    return entries[order].astype(np.int64), columns[order].astype(np.int64)
