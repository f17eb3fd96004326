"""Roll-ups: count, mean, smallest and largest value of stretches of steps, at nested widths.

Level k has buckets of 16 * 4^k steps, of which 256 to a row; bucket b holds the steps from
b * width to before (b + 1) * width. A view of a long run reads the level that is as wide as a pixel
of it.

Up to a step E (a multiple of 16, `watermarks.RankWatermark.end`) everything of a rank is in level
0. A level ends where the last 16 of its buckets are complete, so that not all levels change with
each batch; what lies between its end and E is in the levels below it.

A value that is no number must not vanish among others: NaN makes the mean of its bucket NaN
(smallest and largest are those of the numbers beside it, NaN where there is none), an infinity
shows in the extremes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankscope.agent.wire import Float64, Int64
from rankscope.server.storage.database.packing import pack, unpack

BASE = 16
FANOUT = 4
# Buckets of a row: with 3 x 4 bytes each a row fills a page of SQLite's.
ROW = 256
LEVELS = 9
_COMPLETE = 16
# float32 where no value moves by more than this part of what the row's values span: less than a
# pixel, also of a chart that shows these alone.
_EXACT_ENOUGH = 1 / 4096


def width(level: int) -> int:
    """Steps of a bucket."""
    return BASE << 2 * level


def level_end(level: int, end: int) -> int:
    """Up to before which step a level is filled where level 0 is up to `end`."""
    whole = width(0) if level == 0 else _COMPLETE * width(level)
    return end // whole * whole


@dataclass(frozen=True, slots=True)
class Buckets:
    """Buckets of one width. Shapes: M series with the same steps, N buckets.

    Attributes:
        index: int64 [N], ascending: of those that hold anything.
        count: int64 [N], points.
        mean, low, high: float64 [M, N]; float32 where they are as they were stored.
    """

    index: Int64
    count: Int64
    mean: Float64
    low: Float64
    high: Float64

    def part(self, first: int, end: int) -> Buckets:
        """Those with an index from `first` to before `end`."""
        a, b = np.searchsorted(self.index, (first, end))
        return Buckets(
            self.index[a:b],
            self.count[a:b],
            self.mean[:, a:b],
            self.low[:, a:b],
            self.high[:, a:b],
        )

    def series(self, place: int) -> Buckets:
        """Those of one series alone."""
        only = slice(place, place + 1)
        return Buckets(self.index, self.count, self.mean[only], self.low[only], self.high[only])


def of_points(index: Int64, values: Float64) -> Buckets:
    """Buckets of points, each of which names its own, ascending; float64 [M, S]."""
    return combined(index, np.ones(len(index), np.int64), values, values, values)


def coarser(buckets: Buckets, factor: int) -> Buckets:
    """Buckets that are `factor` times as wide."""
    return combined(buckets.index // factor, buckets.count, buckets.mean, buckets.low, buckets.high)


def combined(index: Int64, count: Int64, mean: Float64, low: Float64, high: Float64) -> Buckets:
    """One bucket of those with the same index, ascending."""
    if len(index) == 0:
        return Buckets(index, count, mean, low, high)
    starts = _starts(index)
    if len(starts) == len(index):
        return Buckets(index, count, mean, low, high)
    total = np.add.reduceat(count, starts)
    each = np.diff(np.append(starts, len(index)))
    with np.errstate(invalid="ignore"):
        # Divided first: a sum of large numbers would be infinite.
        share = count / np.repeat(total, each)
        means = np.add.reduceat(mean * share, starts, axis=-1)
    return Buckets(
        index[starts],
        total,
        means,
        np.fmin.reduceat(low, starts, axis=-1),
        np.fmax.reduceat(high, starts, axis=-1),
    )


def joined(parts: Sequence[Buckets]) -> Buckets:
    """One after the other."""
    if len(parts) == 1:
        return parts[0]
    return Buckets(
        np.concatenate([p.index for p in parts]),
        np.concatenate([p.count for p in parts]),
        np.concatenate([p.mean for p in parts], axis=-1),
        np.concatenate([p.low for p in parts], axis=-1),
        np.concatenate([p.high for p in parts], axis=-1),
    )


def rows(buckets: Buckets, level: int) -> list[dict[str, Any]]:
    """Rows of the table `rollup` with the buckets of one series (M = 1), without their key."""
    block = buckets.index // ROW
    made = []
    for first, end in _runs(block):
        index = buckets.index[first:end]
        offset = (index - block[first] * ROW).astype(np.uint8)
        count = buckets.count[first:end]
        values = np.concatenate(
            [buckets.mean[0, first:end], buckets.low[0, first:end], buckets.high[0, first:end]]
        )
        dense = int(index[-1] - index[0]) + 1 == len(index)
        made.append(
            {
                "block": int(block[first]),
                "first": int(offset[0]),
                "buckets": len(index),
                "offsets": None if dense else pack(offset),
                "counts": None if (count == width(level)).all() else pack(count.astype(np.int32)),
                "values": pack(narrow(values)),
            }
        )
    return made


def read_rows(found: Sequence[Any], level: int) -> Buckets:
    """Buckets of rows of the table `rollup`, in the order of these; M = 1.

    Of several series, one behind the other, the index ascends within each only. Values are float32
    where all rows have that.
    """
    if not found:
        return EMPTY
    sizes = np.array([row.buckets for row in found], np.int64)
    begin = np.array([row.block * ROW + row.first for row in found], np.int64)
    before = np.cumsum(sizes) - sizes
    index = np.arange(sizes.sum(), dtype=np.int64) + np.repeat(begin - before, sizes)
    count = np.full(len(index), width(level), np.int64)
    for n, row in enumerate(found):
        part = slice(int(before[n]), int(before[n] + sizes[n]))
        if row.offsets is not None:
            index[part] = unpack(row.offsets, np.uint8) + np.int64(row.block * ROW)
        if row.counts is not None:
            count[part] = unpack(row.counts, np.int32)
    narrow = [len(row.values) == 12 * row.buckets for row in found]
    if all(narrow):
        data = unpack(b"".join([row.values for row in found]), np.float32)
    else:
        # NaN and infinities of float32 are the same in float64.
        data = np.concatenate(
            [
                unpack(row.values, np.float32 if short else np.float64)
                for row, short in zip(found, narrow, strict=True)
            ]
        )
    # A row has its means, then its lows, then its highs.
    cuts = list(zip((3 * before).tolist(), sizes.tolist(), strict=True))
    mean, low, high = (
        np.concatenate([data[at + k * n : at + (k + 1) * n] for at, n in cuts])[None]
        for k in range(3)
    )
    return Buckets(index, count, mean, low, high)


def by_metric(found: Sequence[Any], level: int) -> Mapping[int, Buckets]:
    """Buckets of each series of one rank, out of rows ordered by metric and block."""
    of: dict[int, list[Any]] = {}
    for row in found:
        of.setdefault(row.metric, []).append(row)
    return {metric: read_rows(some, level) for metric, some in of.items()}


def narrow(values: Float64) -> Any:
    """The values as float32 where a drawing of these alone does not show it, else as they are."""
    if len(values) == 0:
        return values.astype(np.float32)
    short, differs = narrowed(values, np.zeros(1, np.int64))
    return values if differs[0] else short


def narrowed(values: Any, starts: Int64) -> tuple[Any, Any]:
    """Values as float32, and where drawings show that.

    Args:
        values: float64 [N].
        starts: int64 [K], ascending from 0: where each stretch begins that is drawn alone.

    Returns:
        float32 [N] and bool [K].
    """
    # Values beyond float32's range are inf in it, and so no longer near what they were.
    with np.errstate(over="ignore", invalid="ignore"):
        short = values.astype(np.float32)
        moved = np.subtract(short, values)
        np.abs(moved, out=moved)
        finite = np.isfinite(values)
        if not finite.all():
            moved[~finite] = 0
        furthest = np.maximum.reduceat(moved, starts)
        return short, _seen(furthest, spans(values, starts))


def spans(values: Any, starts: Int64) -> Any:
    """From the smallest to the largest number of each stretch; infinite where there is none."""
    finite = np.isfinite(values)
    low = high = values
    if not finite.all():
        low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
    with np.errstate(over="ignore"):
        return np.abs(np.maximum.reduceat(high, starts) - np.minimum.reduceat(low, starts))


def shows(values: Any, spans: Any) -> bool:
    """Whether any of some values as float32 is seen to differ, each in a drawing of such a span."""
    with np.errstate(over="ignore", invalid="ignore"):
        moved = np.where(np.isfinite(values), np.abs(values.astype(np.float32) - values), 0)
        return bool(_seen(moved, spans).any())


def _seen(moved: Any, spans: Any) -> Any:
    # Where numbers span more than float64 holds, those beyond float32's range are beyond it still.
    return (moved > spans * _EXACT_ENOUGH) | np.isinf(moved)


def _starts(index: Int64) -> Int64:
    starts: Int64 = np.flatnonzero(np.append(True, index[1:] != index[:-1]))
    return starts


def _runs(values: Int64) -> list[tuple[int, int]]:
    if len(values) == 0:
        return []
    starts = _starts(values).tolist()
    return list(zip(starts, [*starts[1:], len(values)], strict=True))


_NONE = np.empty(0, np.int64)
_NOTHING = np.empty((1, 0))
EMPTY = Buckets(_NONE, _NONE, _NOTHING, _NOTHING, _NOTHING)
