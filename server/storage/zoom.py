"""A series at the zoom at which it is looked at: roll-ups where they go, points for the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from sqlalchemy import Connection, select

from rankscope.agent.wire import Int64
from rankscope.server.storage import rollups, schema
from rankscope.server.storage.marks import Mark
from rankscope.server.storage.points import Points, read_points

# Points, and buckets, that a view may read to be finer than the next level is.
_MAX_POINTS = 2_000_000
_MAX_BUCKETS = 1_000_000
# Of so few points the buckets are as wide as asked, whatever levels there are.
_FEW_POINTS = 50_000
# Ranks are read together as far as their roll-ups go equally far, give or take this many steps.
_TOGETHER = 1024
_INDEX_BITS = 40


@dataclass(frozen=True, slots=True)
class Zoom:
    """How a view is cut into buckets.

    Attributes:
        width: steps of a bucket; buckets begin at its multiples.
        level: of the roll-ups to read; None for points alone.
    """

    width: int
    level: int | None


def choose(first: int, last: int, *, ranks: int, max_points: int) -> Zoom:
    """The finest zoom that has at most `max_points` buckets and is cheap to read."""
    least = -(-(last - first + 1) // max_points)
    for zoom in _zooms(least, max(ranks, 1) * (last - first + 1)):
        if last // zoom.width - first // zoom.width < max_points:
            return zoom
    raise AssertionError("widths are without end")


def _zooms(least: int, points: int) -> Iterator[Zoom]:
    """Zooms at least so wide, ascending."""
    if points <= _MAX_POINTS:
        widest = 2 * least + 2 if points <= _FEW_POINTS else rollups.BASE
        for width in range(least, widest):
            yield Zoom(width, None)
    for level in range(rollups.LEVELS):
        step = rollups.width(level)
        top = level == rollups.LEVELS - 1
        fine = top or points // step <= _MAX_BUCKETS
        factor = max(1, -(-least // step))
        while (factor < rollups.FANOUT and fine) or factor == 1 or top:
            yield Zoom(factor * step, level)
            factor += 1


def read_buckets(
    connection: Connection,
    *,
    run: int,
    metric: int,
    places: Mapping[int, int],
    ranks: Collection[int],
    mark: Mark,
    zoom: Zoom,
    first: int,
    last: int,
) -> tuple[Int64, rollups.Buckets]:
    """Buckets of all ranks, by rank: int64 [N] ranks, and the buckets (M = 1).

    Args:
        metric: the series' number in the run's dictionary; it stands at `places`.
        first, last: steps; buckets at the ends are whole.
    """
    first = first // zoom.width * zoom.width
    last = min((last // zoom.width + 1) * zoom.width, 2**63) - 1
    parts: list[tuple[Int64, rollups.Buckets]] = []
    for end, some in _by_end(_valid_until(connection, run, ranks, mark)).items():
        below = min(end, last + 1)
        if zoom.level is not None:
            stop = first
            for level in range(zoom.level, -1, -1):
                begin, stop = stop, max(stop, min(rollups.level_end(level, end), last + 1))
                if begin < stop:
                    parts.append(_read(connection, run, metric, level, some, begin, stop))
            below = max(first, below)
        else:
            below = first
        if below <= last:
            points = read_points(
                connection, run=run, places=places, ranks=some, mark=mark, first=below, last=last
            )
            parts.append(_of_points(points))
    return _together(parts, zoom.width)


def _valid_until(
    connection: Connection, run: int, ranks: Collection[int], mark: Mark
) -> dict[int, int]:
    """Up to before which step the roll-ups of each rank hold."""
    found = {rank: mark.ranks[rank].end if rank in mark.ranks else 0 for rank in ranks}
    c = schema.chunk.c
    # What has come since the mark may be of steps that were rolled up before.
    for row in connection.execute(
        select(c.rank, c.first_step).where(c.run == run, c.arrival > mark.arrival)
    ):
        if row.first_step < found.get(row.rank, 0):
            found[row.rank] = row.first_step // rollups.BASE * rollups.BASE
    return found


def _by_end(ends: Mapping[int, int]) -> dict[int, list[int]]:
    """Ranks that are read together, by the step up to which they are."""
    groups: dict[int, list[int]] = defaultdict(list)
    for rank, end in sorted(ends.items()):
        groups[end // _TOGETHER].append(rank)
    return {min(ends[rank] for rank in some): some for some in groups.values()}


def _read(
    connection: Connection,
    run: int,
    metric: int,
    level: int,
    ranks: Sequence[int],
    begin: int,
    stop: int,
) -> tuple[Int64, rollups.Buckets]:
    """Buckets of a level from step `begin` to before `stop`, their indices in steps."""
    t = schema.rollup.c
    step = rollups.width(level)
    a, b = begin // step, -(-stop // step)
    rows = connection.execute(
        select(t.rank, t.block, t.first, t.buckets, t.offsets, t.counts, t["values"])
        .where(
            *(t.run == run, t.metric == metric, t.level == level, t.rank.in_(ranks)),
            *(t.block >= a // rollups.ROW, t.block <= (b - 1) // rollups.ROW),
        )
        .order_by(t.rank, t.block)
    ).all()
    found = rollups.read_rows(rows, level)
    rank = np.repeat(np.array([row.rank for row in rows], np.int64), [row.buckets for row in rows])
    index, count, mean, low, high = (
        *(found.index, found.count),
        *(found.mean, found.low, found.high),
    )
    inside = (index >= a) & (index < b)
    if not inside.all():
        rank, index, count = rank[inside], index[inside], count[inside]
        mean, low, high = mean[:, inside], low[:, inside], high[:, inside]
    return rank, rollups.Buckets(index * step, count, mean, low, high)


def _of_points(points: Points) -> tuple[Int64, rollups.Buckets]:
    values = points.values[None]
    ones = np.ones(len(points.steps), np.int64)
    return points.rank, rollups.Buckets(points.steps, ones, values, values, values)


def _together(
    parts: Sequence[tuple[Int64, rollups.Buckets]], width: int
) -> tuple[Int64, rollups.Buckets]:
    parts = [part for part in parts if len(part[0])]
    if not parts:
        return _NOBODY, rollups.EMPTY
    everyone, rank = np.unique(np.concatenate([rank for rank, _ in parts]), return_inverse=True)
    found = rollups.joined([buckets for _, buckets in parts])
    index = found.index // width
    # Indices count from the first one: a step may have 63 bits.
    lowest = index.min()
    key = (rank << _INDEX_BITS) | (index - lowest)
    count, mean, low, high = found.count, found.mean, found.low, found.high
    if len(parts) > 1:
        order = np.argsort(key, kind="stable")
        key, count = key[order], count[order]
        mean, low, high = mean[:, order], low[:, order], high[:, order]
    done = rollups.combined(key, count, mean, low, high)
    index = ((done.index & ((1 << _INDEX_BITS) - 1)) + lowest) * width
    return everyone[done.index >> _INDEX_BITS], rollups.Buckets(
        index, done.count, done.mean, done.low, done.high
    )


_NOBODY = np.empty(0, np.int64)
