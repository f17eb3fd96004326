"""Series as they are drawn: attempts merged, raw where they fit, else in buckets."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from struct import Struct
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, Connection, Select, func, select, true

from rankscope.agent.wire import Float64, Int64
from rankscope.server.storage import schema
from rankscope.server.storage.database.packing import unpack, unpack_steps
from rankscope.server.storage.ingest.dictionary import places_of, read_layouts
from rankscope.server.storage.maintenance import rollups, watermarks
from rankscope.server.storage.reading import layers
from rankscope.server.storage.reading.extent import ends_of, scalar_extents
from rankscope.server.storage.reading.points import by_rank_of, read_each
from rankscope.server.storage.reading.zoom import choose, read_buckets

# One number of a row, as `packing.pack` wrote it.
_LAST = Struct("<d")


@dataclass(frozen=True, slots=True)
class MetricRow:
    """A series that a run has."""

    name: str
    ranks: tuple[int, ...]
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True)
class RankSeries:
    """One metric of one rank.

    Attributes:
        steps: int64 [N], ascending; where each bucket begins, if these are buckets.
        values: float64 [N], raw values or means.
        low, high: float64 [N], smallest and largest value of each bucket; the values themselves
            where they are raw.
        width: steps of a bucket; 1 where the values are raw.
    """

    rank: int
    steps: Int64
    values: Float64
    low: Float64
    high: Float64
    width: int = 1


def list_metrics(connection: Connection, *, run: int) -> list[MetricRow]:
    """All scalars of a run, by name; those of single tensors are in `layers.list_families`."""
    return [
        MetricRow(name, *extent) for name, extent in scalar_extents(connection, run=run).items()
    ]


def read_series(
    connection: Connection,
    *,
    run: int,
    metric: str,
    ranks: Collection[int] | None = None,
    from_step: int | None = None,
    to_step: int | None = None,
    max_points: int = 2000,
    kind: str = "scalar",
    steady: bool = False,
) -> list[RankSeries]:
    """A metric of each rank that has it, over a range of steps (both ends included).

    One of a single tensor is called `<metric>/<tensor>`, unless a scalar has that name.

    Where a step was done twice, by an attempt and by a later one, the later one stands. Where the
    points of a rank do not fit into `max_points`, they fall into at most that many buckets of equal
    width, which begin at multiples of it: those at the ends of the range are whole ones. `steady`
    is as of `zoom.choose`.
    """
    m = schema.metric.c
    number = connection.scalar(select(m.id).where(m.run == run, m.kind == kind, m.name == metric))
    places = {} if number is None else places_of(read_layouts(connection, run=run), number)
    if number is None or not places:
        source = layers.points(connection, run=run, name=metric) if kind == "scalar" else None
        if source is None:
            return []
        return _of_tensor(connection, source, ranks, from_step, to_step, max_points)
    watermark = watermarks.load(connection, run=run)
    if from_step is not None and to_step is not None:
        # Nothing has to be asked about all of a rank: who has no such series has no points.
        there, first, last = _ranks(connection, run, ranks), from_step, to_step
    else:
        extent = _extent(connection, run, places, watermark, ranks)
        if extent is None:
            return []
        there, lowest, highest = extent
        first = lowest if from_step is None else from_step
        last = highest if to_step is None else to_step
    if first > last or not there:
        return []
    read = partial(read_each, connection, run=run, places=places, watermark=watermark)
    if last - first < max_points:
        return [_of_points(*one) for one in read(ranks=there, first=first, last=last)]
    zoom = choose(first, last, ranks=len(there), max_points=max_points, steady=steady)
    parts = read_buckets(
        connection,
        run=run,
        metric=number,
        places=places,
        ranks=there,
        watermark=watermark,
        zoom=zoom,
        first=first,
        last=last,
    )
    answer = [one for of, found in parts for one in _in_buckets(of, found, zoom.width)]
    few = [s.rank for s, points in answer if points <= max_points]
    raw = read(ranks=few, first=first, last=last) if few else []
    fine = {one[0]: _of_points(*one) for one in raw}
    return [
        fine[s.rank] if points <= max_points else s
        for s, points in answer
        if points > max_points or s.rank in fine
    ]


def _ranks(connection: Connection, run: int, wanted: Collection[int] | None) -> list[int]:
    a = schema.attempt.c
    found = connection.scalars(select(a.rank).where(a.run == run).distinct().order_by(a.rank))
    return [rank for rank in found if wanted is None or rank in wanted]


def _extent(
    connection: Connection,
    run: int,
    places: Mapping[int, int],
    watermark: watermarks.Watermark,
    ranks: Collection[int] | None,
) -> tuple[list[int], int, int] | None:
    """Ranks that have a series, of those that are wanted, and its first and last step."""
    c = schema.chunk.c
    of = schema.layout.c
    ends = [
        row
        for row in ends_of(
            connection, c.layout, select(of.id).where(of.run == run, of.id.in_(places)), run
        )
        if ranks is None or row.rank in ranks
    ]
    if not ends:
        return None
    there = sorted({row.rank for row in ends})
    last = max(row.last_step for row in ends)
    # What begins last need not end last: a restart, or points that came again.
    longest = max((m.longest for m in watermark.ranks.values()), default=0)
    for where in (
        (c.layout.in_(places), c.rank.in_(there), c.first_step >= last - longest),
        ((c.layout + 0).in_(places), (c.rank + 0).in_(there), c.arrival > watermark.arrival),
    ):
        found = connection.scalar(select(func.max(c.last_step)).where(c.run == run, *where))
        last = max(last, -1 if found is None else found)
    return there, min(row.first_step for row in ends), last


def _of_points(rank: int, steps: Int64, values: Float64) -> RankSeries:
    return RankSeries(rank, steps, values, values, values)


def _in_buckets(rank: Int64, found: rollups.Buckets, width: int) -> list[tuple[RankSeries, int]]:
    """Series in buckets, each with the number of its points."""
    mean, low, high = found.mean[0], found.low[0], found.high[0]
    return [
        (
            RankSeries(n, found.index[a:b], mean[a:b], low[a:b], high[a:b], width),
            int(found.count[a:b].sum()),
        )
        for n, a, b in by_rank_of(rank)
    ]


def _of_tensor(
    connection: Connection,
    source: Select[Any],
    ranks: Collection[int] | None,
    from_step: int | None,
    to_step: int | None,
    max_points: int,
) -> list[RankSeries]:
    """Series of a single tensor, of which there are no roll-ups."""
    c = source.subquery().c
    wanted: list[ColumnElement[bool]] = []
    if ranks is not None:
        wanted.append(c.rank.in_(list(ranks)))
    if from_step is not None:
        wanted.append(c.last_step >= from_step)
    if to_step is not None:
        wanted.append(c.first_step <= to_step)
    there = connection.execute(
        select(func.min(c.first_step), func.max(c.last_step)).where(*wanted)
    ).one()
    if there[0] is None:
        return []
    first = int(there[0]) if from_step is None else from_step
    last = int(there[1]) if to_step is None else to_step
    # Later attempts last, and of one attempt later batches last: the last value of a step stands.
    rows = connection.execute(
        select(c.rank, c.first_step, c.points, c.steps, c["values"])
        .where(*wanted)
        .order_by(c.rank, c.attempt, c.arrival)
        .execution_options(yield_per=500)
    )
    found = []
    # A rank at a time: of a long run of many ranks not all points fit into memory.
    for rank, of_rank in groupby(rows, key=attrgetter("rank")):
        chunks = [
            (unpack_steps(r.steps, r.first_step, r.points), unpack(r.values, np.float64))
            for r in of_rank
        ]
        steps, values = _merge(chunks, from_step, to_step)
        if len(steps):
            found.append(
                in_buckets(rank, steps, values, first=first, last=last, max_points=max_points)
            )
    return found


def _merge(
    chunks: list[tuple[Int64, Float64]], from_step: int | None, to_step: int | None
) -> tuple[Int64, Float64]:
    steps = np.concatenate([s for s, _ in chunks])
    values = np.concatenate([v for _, v in chunks])
    if not bool((steps[1:] > steps[:-1]).all()):
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
        stands = np.append(steps[1:] > steps[:-1], True)
        steps, values = steps[stands], values[stands]
    low = 0 if from_step is None else int(np.searchsorted(steps, from_step, "left"))
    high = len(steps) if to_step is None else int(np.searchsorted(steps, to_step, "right"))
    return steps[low:high], values[low:high]


def in_buckets(
    rank: int, steps: Int64, values: Float64, *, first: int, last: int, max_points: int
) -> RankSeries:
    """Points as they are, where they fit, else mean, smallest and largest value of each bucket.

    A value that is no number must not vanish among others: NaN makes the mean of its bucket NaN
    (smallest and largest are those of the numbers beside it), an infinity shows in the extremes.
    """
    if len(steps) <= max_points:
        return _of_points(rank, steps, values)
    width = -(-(last - first + 1) // max_points)
    bucket = (steps - first) // width
    starts = np.flatnonzero(np.append(True, np.diff(bucket) > 0))
    counts = np.diff(np.append(starts, len(steps)))
    with np.errstate(invalid="ignore"):
        # Divided first: a sum of large numbers would be infinite.
        means = np.add.reduceat(values / np.repeat(counts, counts), starts)
    number = ~np.isnan(values)
    low = np.minimum.reduceat(np.where(number, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(number, values, -np.inf), starts)
    empty = ~np.logical_or.reduceat(number, starts)
    low[empty] = high[empty] = np.nan
    return RankSeries(rank, steps[starts], means, low, high, width)


def latest_values(
    connection: Connection, *, run: int, metrics: Collection[str]
) -> dict[tuple[int, str], float]:
    """Value at the last step of some metrics, by (rank, metric)."""
    m, c, a, of = schema.metric.c, schema.chunk.c, schema.attempt.c, schema.layout.c
    names = {
        row.id: row.name
        for row in connection.execute(
            select(m.id, m.name).where(m.run == run, m.kind == "scalar", m.name.in_(list(metrics)))
        )
    }
    layouts = read_layouts(connection, run=run)
    wanted = {
        number: [(place, names[metric]) for place, metric in enumerate(of_it) if metric in names]
        for number, of_it in layouts.items()
    }
    ranks = select(a.rank).where(a.run == run).distinct().subquery()
    # One read of the end of the primary key a set of series and rank, however long that is.
    newest = (
        select(func.max(c.first_step))
        .where(c.run == run, c.layout == of.id, c.rank == ranks.c.rank)
        .scalar_subquery()
        .correlate(schema.layout, ranks)
    )
    ends = (
        select(of.id, ranks.c.rank, newest.label("first_step"))
        .join(ranks, true())
        .where(of.run == run, of.id.in_([number for number, some in wanted.items() if some]))
        .subquery()
    )
    rows = connection.execute(
        select(c.layout, c.rank, c.points, c["values"])
        .join(
            ends,
            (c.layout == ends.c.id) & (c.rank == ends.c.rank) & (c.first_step == ends.c.first_step),
        )
        .where(c.run == run)
        .order_by(c.first_step, c.arrival)
    )
    found: dict[tuple[int, str], float] = {}
    # A thousand ranks have as many rows: an array for each would cost more than reading them.
    for layout, rank, points, values in rows:
        for place, name in wanted[layout]:
            [found[rank, name]] = _LAST.unpack_from(values, _LAST.size * ((place + 1) * points - 1))
    return found
