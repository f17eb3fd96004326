"""A series at the zoom at which it is viewed: roll-ups where they go, points for the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from sqlalchemy import Connection, select

from rankscope.agent.wire import Array, Int64
from rankscope.server.storage import schema
from rankscope.server.storage.maintenance import rollups
from rankscope.server.storage.maintenance.watermarks import Watermark
from rankscope.server.storage.reading.points import Points, read_points

# Points, and buckets, that a view may read to be finer than the next level is.
_MAX_POINTS = 2_000_000
_MAX_BUCKETS = 1_000_000
# Of so few points the buckets are as wide as asked, whatever levels there are.
_FEW_POINTS = 50_000
# Ranks are read together as far as their roll-ups go equally far, give or take this many steps.
_TOGETHER = 1024
# What is computed for this many ranks at a time stays in the processor's caches, mostly.
_AT_ONCE = 128
_INDEX_BITS = 40
# Values that are put in between others piece by piece.
_FEW_PIECES = 20_000


@dataclass(frozen=True, slots=True)
class Zoom:
    """How a view is cut into buckets.

    Attributes:
        width: steps of a bucket; buckets begin at its multiples.
        level: of the roll-ups to read; None for points alone.
    """

    width: int
    level: int | None


def choose(first: int, last: int, *, ranks: int, max_points: int, steady: bool = False) -> Zoom:
    """The finest zoom that has at most `max_points` buckets and is cheap to read.

    Args:
        steady: of widths that are powers of two: those of a run that goes on stay what they are
            until it is twice as long, and who follows it is sent the new ones alone.
    """
    least = -(-(last - first + 1) // max_points)
    if steady:
        least = 1 << (least - 1).bit_length()
    for zoom in _zooms(least, max(ranks, 1) * (last - first + 1)):
        fits = last // zoom.width - first // zoom.width < max_points
        if fits and not (steady and zoom.width & (zoom.width - 1)):
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
    watermark: Watermark,
    zoom: Zoom,
    first: int,
    last: int,
) -> Iterator[tuple[Int64, rollups.Buckets]]:
    """Buckets of some ranks at a time, by rank: int64 [N] ranks, and their buckets (M = 1).

    Args:
        metric: the series' number in the run's dictionary; it stands at `places`.
        first, last: steps; buckets at the ends are whole.
    """
    first = first // zoom.width * zoom.width
    last = min((last // zoom.width + 1) * zoom.width, 2**63) - 1
    ends = _valid_until(connection, run, ranks, watermark)
    everyone = sorted(ranks)
    for at in range(0, len(everyone), _AT_ONCE):
        some = everyone[at : at + _AT_ONCE]
        parts: list[rollups.Buckets] = []
        for end, these in _by_end({rank: ends[rank] for rank in some}).items():
            below = min(end, last + 1)
            if zoom.level is not None:
                stop = first
                for level in range(zoom.level, -1, -1):
                    begin, stop = stop, max(stop, min(rollups.level_end(level, end), last + 1))
                    if begin < stop:
                        found = _read(connection, run, metric, level, these, begin, stop)
                        parts.append(_keyed(some, *found, zoom.width, first, rollups.width(level)))
                below = max(first, below)
            else:
                below = first
            if below <= last:
                points = read_points(
                    connection,
                    run=run,
                    places=places,
                    ranks=these,
                    watermark=watermark,
                    first=below,
                    last=last,
                )
                parts.append(_keyed(some, *_of_points(points), zoom.width, first, 1))
        done = _together([part for part in parts if len(part.index)])
        index = (done.index & ((1 << _INDEX_BITS) - 1)) * zoom.width + first
        yield (
            np.array(some, np.int64)[done.index >> _INDEX_BITS],
            rollups.Buckets(index, done.count, done.mean, done.low, done.high),
        )


def _valid_until(
    connection: Connection, run: int, ranks: Collection[int], watermark: Watermark
) -> dict[int, int]:
    """Up to before which step the roll-ups of each rank hold."""
    found = {rank: watermark.ranks[rank].end if rank in watermark.ranks else 0 for rank in ranks}
    c = schema.chunk.c
    # What has come since the watermark may be of steps that were rolled up before.
    for row in connection.execute(
        select(c.rank, c.first_step).where(c.run == run, c.arrival > watermark.arrival)
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
    """Buckets of a level from step `begin` to before `stop`, their indices in its widths.

    Args:
        ranks: ascending.
    """
    t = schema.rollup.c
    step = rollups.width(level)
    a, b = begin // step, -(-stop // step)
    # A thousand ranks one by one take longer to ask for than to read; where the view begins with
    # the run, what lies between the first and the last of them is wanted anyway.
    whole = a == 0 and ranks[-1] - ranks[0] == len(ranks) - 1
    among = t.rank.between(ranks[0], ranks[-1]) if whole else t.rank.in_(ranks)
    rows = connection.execute(
        select(t.rank, t.block, t.first, t.buckets, t.offsets, t.counts, t["values"])
        .where(
            *(t.run == run, t.metric == metric, t.level == level, among),
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
    return rank, rollups.Buckets(index, count, mean, low, high)


def _of_points(points: Points) -> tuple[Int64, rollups.Buckets]:
    values = points.values[None]
    ones = np.ones(len(points.steps), np.int64)
    return points.rank, rollups.Buckets(points.steps, ones, values, values, values)


def _keyed(
    everyone: Sequence[int], rank: Int64, found: rollups.Buckets, width: int, first: int, step: int
) -> rollups.Buckets:
    """Buckets of a view, by a key that ascends with the place of the rank and the bucket.

    Args:
        rank: int64 [N], ascending.
        found: [N], indices in units of `step` steps.
    """
    # Rank by rank: there may be a million buckets.
    starts = np.flatnonzero(np.append(True, rank[1:] != rank[:-1])) if len(rank) else rank
    places = np.searchsorted(everyone, rank[starts])
    place = np.repeat(places << _INDEX_BITS, np.diff(np.append(starts, len(rank))))
    # Indices count from the first one: a step may have 63 bits.
    index = found.index - first // step
    if width != step:
        index = index // (width // step)
    return rollups.combined(place | index, found.count, found.mean, found.low, found.high)


def _together(parts: Sequence[rollups.Buckets]) -> rollups.Buckets:
    """All parts by key; buckets that several have a share in become one."""
    if not parts:
        return rollups.EMPTY
    most = max(parts, key=lambda part: len(part.index))
    rest = [part for part in parts if part is not most]
    if not rest:
        return most
    # The rest is little, mostly: what is not in it stays as it is.
    few = _sorted(rest)
    at = np.searchsorted(most.index, few.index)
    shared = at[np.append(most.index, -1)[at] == few.index]
    if len(shared):
        few = _sorted([few, _picked(most, shared)])
        left = np.ones(len(most.index), bool)
        left[shared] = False
        most = _picked(most, np.flatnonzero(left))
    if len(most.index) == 0:
        return few
    at = np.searchsorted(most.index, few.index)
    place = most.index >> _INDEX_BITS
    starts = np.flatnonzero(np.append(True, place[1:] != place[:-1]))
    of = np.searchsorted(place[starts], few.index >> _INDEX_BITS, "right") - 1
    values = []
    for one, some in ((most.mean, few.mean), (most.low, few.low), (most.high, few.high)):
        # Float32 as far as what is put into it takes that.
        if one.dtype != some.dtype and rollups.shows(some[0], rollups.spans(one[0], starts)[of]):
            one = one.astype(np.float64)
        values.append(_inserted(one[0], at, some[0])[None])
    return rollups.Buckets(
        _inserted(most.index, at, few.index), _inserted(most.count, at, few.count), *values
    )


def _inserted(into: Array, at: Int64, what: Array) -> Array:
    """As `np.insert` of few values into many: what lies between them is copied in one piece."""
    if len(what) > _FEW_PIECES:
        return np.insert(into, at, what)
    places = np.flatnonzero(np.append(True, at[1:] != at[:-1])) if len(at) else at
    pieces: list[Array] = []
    before = 0
    for start, end in zip(places.tolist(), [*places[1:].tolist(), len(at)], strict=True):
        here = int(at[start])
        pieces += [into[before:here], what[start:end].astype(into.dtype, copy=False)]
        before = here
    made: Array = np.concatenate([*pieces, into[before:]])
    return made


def _sorted(parts: Sequence[rollups.Buckets]) -> rollups.Buckets:
    found = rollups.joined(parts)
    found = _picked(found, np.argsort(found.index, kind="stable"))
    return rollups.combined(found.index, found.count, found.mean, found.low, found.high)


def _picked(of: rollups.Buckets, at: Int64) -> rollups.Buckets:
    return rollups.Buckets(
        of.index[at], of.count[at], of.mean[:, at], of.low[:, at], of.high[:, at]
    )
