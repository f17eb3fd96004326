"""Roll-ups of what has come, and long rows of short ones, made beside the ingest in small steps.

    while compact(engine, run):
        ...

A step looks at new rows of `chunk`, or rolls up and merges those of some ranks. It reads and
computes outside of the transaction that writes, which fails without a trace where another server
was faster, or this one is killed: the watermark of the run (`watermarks.py`) and the rows it speaks
of change together.

Points that come late, or again, take the watermark of their rank back to before them: what follows
is rolled up anew, and until then read raw.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sqlalchemy import Connection, Engine, and_, delete, insert, or_, select

from rankscope.agent.wire import Float64, Int64
from rankscope.server.storage import schema
from rankscope.server.storage.database.engine import reading, writing
from rankscope.server.storage.database.packing import unpack, unpack_steps
from rankscope.server.storage.ingest.dictionary import read_layouts
from rankscope.server.storage.maintenance import merging, rollups, watermarks

# Rows of `chunk` examined in one step.
_MAX_ROWS = 20_000
# Points of a step: it holds up batches while it writes.
_MAX_POINTS = 400_000
# A rank is rolled up when a view would have to read more rows or steps raw than these.
# Each costs the same for a few steps as for some thousand.
_MAX_WAITING = 16
_MAX_STEPS = 1024
# Behind the last whole bucket whose end is a number of the database; what lies there stays as it
# came.
_LAST_END = 2**63 - rollups.BASE


def runs_to_compact(connection: Connection) -> list[int]:
    """Keys of runs that have something new, or something left to do."""
    r, m = schema.run.c, schema.rollup_mark.c
    found = (
        select(r.key)
        .outerjoin(schema.rollup_mark, m.run == r.key)
        .where(or_(m.run.is_(None), r.arrivals > m.arrival, m.pending))
        .order_by(r.key)
    )
    return [int(key) for key in connection.scalars(found)]


def compact(engine: Engine, run: int, *, max_points: int = _MAX_POINTS) -> bool:
    """Does one step for a run; True where there is more to do."""
    with reading(engine) as connection:
        watermark = watermarks.load(connection, run=run)
        more = _take_arrivals(connection, run, watermark)
        made: list[_Rolled] = []
        scalars = _scalars(connection, run)
        left = max_points
        for rank in () if more else sorted(watermark.ranks):
            if left <= 0:
                break
            if _due(watermark.ranks[rank]):
                made.append(_roll(connection, run, rank, watermark.ranks[rank], scalars, left))
                left -= max(made[-1].points, 1)
        merged = [] if more else merging.make(connection, run, watermark)
    pending = more or any(_due(m) or merging.due(m) for m in watermark.ranks.values())
    metrics = sorted({metric for of in scalars.values() for metric in of.values()})
    try:
        with writing(engine) as connection:
            if not watermarks.save(connection, watermark, run=run, pending=pending):
                return True
            _write(connection, run, made, metrics)
            merging.write(connection, run, merged)
    except merging.Overtaken:
        return True
    return pending


class _Rolled:
    """Rows that a step has made for a rank, and the blocks of each level that they replace."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.points = 0
        self.blocks: list[tuple[int, int, int]] = []
        self.rows: list[dict[str, Any]] = []


def _take_arrivals(connection: Connection, run: int, watermark: watermarks.Watermark) -> bool:
    """Takes note of rows that have come; True where there are more."""
    c = schema.chunk.c
    rows = connection.execute(
        select(c.rank, c.first_step, c.last_step, c.arrival, c.points)
        .where(c.run == run, c.arrival > watermark.arrival)
        .order_by(c.arrival)
        .limit(_MAX_ROWS)
    ).all()
    more = len(rows) == _MAX_ROWS and rows[0].arrival < rows[-1].arrival
    if more:
        # The last arrival may be cut off.
        rows = [row for row in rows if row.arrival < rows[-1].arrival]
        watermark.arrival = rows[-1].arrival
    else:
        r = schema.run.c
        watermark.arrival = connection.scalar(select(r.arrivals).where(r.key == run)) or 0
    if not rows:
        return more
    table = np.array([tuple(row) for row in rows], np.int64)
    watermark.touch(table[:, 1], table[:, 2], table[:, 3])
    table = table[np.argsort(table[:, 0], kind="stable")]
    rank, first, last = table[:, 0], table[:, 1], table[:, 2]
    short = np.where(table[:, 4] <= merging.SHORT, first, -1)
    starts = np.flatnonzero(np.append(True, rank[1:] != rank[:-1]))
    for n, lowest, highest, longest, newest, count in zip(
        rank[starts].tolist(),
        np.minimum.reduceat(first, starts).tolist(),
        np.maximum.reduceat(last, starts).tolist(),
        np.maximum.reduceat(last - first, starts).tolist(),
        np.maximum.reduceat(short, starts).tolist(),
        np.diff(np.append(starts, len(rank))).tolist(),
        strict=True,
    ):
        m = watermark.ranks.setdefault(n, watermarks.RankWatermark(end=_whole(lowest)))
        m.end = min(m.end, _whole(lowest))
        m.short = max(m.short, newest)
        merging.moved_back(m, lowest)
        m.last = max(m.last, highest)
        m.longest = max(m.longest, longest)
        m.waiting += count
    return more


def _due(watermark: watermarks.RankWatermark) -> bool:
    steps = _final(watermark) - watermark.end
    return steps > 0 and (watermark.waiting >= _MAX_WAITING or steps >= _MAX_STEPS)


def _final(watermark: watermarks.RankWatermark) -> int:
    """Up to before which step a rank can be rolled up."""
    return min(_whole(watermark.last + 1), _LAST_END)


def _whole(step: int) -> int:
    return step // rollups.BASE * rollups.BASE


def _scalars(connection: Connection, run: int) -> dict[int, dict[int, int]]:
    """Place -> number of the scalars in each layout that has any."""
    m = schema.metric.c
    wanted = set(connection.scalars(select(m.id).where(m.run == run, m.kind == "scalar")))
    found = {
        layout: {place: metric for place, metric in enumerate(of) if metric in wanted}
        for layout, of in read_layouts(connection, run=run).items()
    }
    return {layout: of for layout, of in found.items() if of}


def _roll(
    connection: Connection,
    run: int,
    rank: int,
    watermark: watermarks.RankWatermark,
    scalars: Mapping[int, Mapping[int, int]],
    max_points: int,
) -> _Rolled:
    """Rolls up the steps from `mark.end` on, as many as there is room for, and moves it on."""
    made = _Rolled(rank)
    begin, final = watermark.end, _final(watermark)
    metrics = sorted({metric for of in scalars.values() for metric in of.values()})
    row_steps = rollups.ROW * rollups.BASE
    room = max(1, max_points // (max(len(metrics), 1) * row_steps))
    end = (begin // row_steps + room) * row_steps
    if end >= final:
        end = final
    else:
        # Steps may be far apart, or be those of digests only: no need to crawl from one to the
        # next.
        end = _reach(connection, run, rank, scalars, begin, final, watermark.longest, max_points)
    series = _points(connection, run, rank, scalars, begin, end, watermark.longest)
    made.points = sum(values.size for _, values in series.values())
    starts = [rollups.level_end(level, begin) for level in range(rollups.LEVELS)]
    old = _old_rows(connection, run, rank, metrics, starts)
    levels: dict[int, rollups.Buckets] = {}
    for members, (steps, values) in series.items():
        found = rollups.of_points(steps // rollups.BASE, values)
        for place, metric in enumerate(members):
            levels[metric] = found.series(place)
    for level, start in enumerate(starts):
        stop = rollups.level_end(level, end)
        if stop == start:
            break
        step = rollups.width(level)
        block = start // step // rollups.ROW
        made.blocks.append((level, block, (stop // step - 1) // rollups.ROW))
        kept = old[level]
        goes_on = level + 1 < rollups.LEVELS and (
            rollups.level_end(level + 1, end) > starts[level + 1]
        )
        for metric in kept.keys() | levels.keys():
            # Of what was there only that before `start` still holds.
            parts = [kept[metric].part(0, start // step)] if metric in kept else []
            if metric in levels:
                parts.append(levels[metric].part(start // step, stop // step))
            whole = rollups.joined(parts)
            key = {"run": run, "metric": metric, "level": level, "rank": rank}
            made.rows += [key | row for row in rollups.rows(whole, level)]
            # What the level above has not got yet.
            if goes_on:
                above = starts[level + 1] // step
                levels[metric] = rollups.coarser(whole.part(above, stop // step), rollups.FANOUT)
    watermark.end = end
    watermark.waiting = 0 if end == final else watermark.waiting
    return made


def _points(
    connection: Connection,
    run: int,
    rank: int,
    scalars: Mapping[int, Mapping[int, int]],
    begin: int,
    end: int,
    longest: int,
) -> dict[tuple[int, ...], tuple[Int64, Float64]]:
    """Points from `begin` to before `end`: of series with the same steps [S] values [M, S]."""
    c = schema.chunk.c
    rows = connection.execute(
        select(c.layout, c.first_step, c.points, c.steps, c["values"])
        .where(
            *(c.run == run, c.layout.in_(list(scalars)), c.rank == rank),
            *(c.first_step >= begin - longest, c.first_step < end, c.last_step >= begin),
        )
        .order_by(c.attempt, c.arrival)
    )
    parts: dict[int, list[tuple[int, Int64, Float64]]] = defaultdict(list)
    for n, row in enumerate(rows):
        steps = unpack_steps(row.steps, row.first_step, row.points)
        values = unpack(row.values, np.float64).reshape(-1, row.points)
        parts[row.layout].append((n, steps, values))
    layouts_of: dict[int, list[int]] = defaultdict(list)
    for layout in parts:
        for metric in scalars[layout].values():
            layouts_of[metric].append(layout)
    # Series that came in the same layouts have the same steps.
    together: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for metric, layouts in layouts_of.items():
        together[tuple(layouts)].append(metric)
    found = {}
    for among, metrics in together.items():
        some = [
            (n, steps, values[_places(scalars[layout], metrics)])
            for layout in among
            for n, steps, values in parts[layout]
        ]
        some.sort(key=lambda part: part[0])
        steps = np.concatenate([s for _, s, _ in some])
        values = np.concatenate([v for _, _, v in some], axis=1)
        if not bool((steps[1:] > steps[:-1]).all()):
            order = np.argsort(steps, kind="stable")
            # Later attempts, and of one attempt later batches, come last: the last one stands.
            ordered = steps[order]
            order = order[np.append(ordered[1:] > ordered[:-1], True)]
            steps, values = steps[order], values[:, order]
        a, b = np.searchsorted(steps, (begin, end))
        if a < b:
            found[tuple(metrics)] = steps[a:b], values[:, a:b]
    return found


def _places(of: Mapping[int, int], metrics: Sequence[int]) -> list[int]:
    at = {metric: place for place, metric in of.items()}
    return [at[metric] for metric in metrics]


def _reach(
    connection: Connection,
    run: int,
    rank: int,
    scalars: Mapping[int, Mapping[int, int]],
    begin: int,
    final: int,
    longest: int,
    max_points: int,
) -> int:
    """Up to before which step there are about this many points from `begin` on; at most `final`.

    The work is that of the points there are, however far apart their steps.
    """
    c = schema.chunk.c
    rows = connection.execute(
        select(c.layout, c.first_step, c.points, c.steps)
        .where(
            *(c.run == run, c.layout.in_(list(scalars)), c.rank == rank),
            *(c.first_step >= begin - longest, c.first_step < final, c.last_step >= begin),
        )
        .order_by(c.first_step)
        .execution_options(yield_per=256)
    )
    held: list[Int64] = []
    weights: list[int] = []
    count, enough = 0, max_points
    beyond = final
    with rows:
        for row in rows:
            if count > enough:
                # All rows from here on have later steps only; are there enough before these?
                end = int(row.first_step)
                before = sum(
                    weight * int(np.searchsorted(steps, end))
                    for steps, weight in zip(held, weights, strict=True)
                )
                if before > max_points:
                    beyond = end
                    break
                enough = 2 * count
            steps = unpack_steps(row.steps, row.first_step, row.points)
            steps = steps[np.searchsorted(steps, begin) :]
            held.append(steps)
            weights.append(len(scalars[row.layout]))
            count += len(steps) * weights[-1]
    if not count:
        return beyond
    every, weight = np.concatenate(held), np.repeat(weights, [len(steps) for steps in held])
    order = np.argsort(every, kind="stable")
    every = every[order]
    over = int(np.searchsorted(np.cumsum(weight[order]), max_points, side="right"))
    end = min(beyond, int(every[over]) if over < len(every) else final)
    # One bucket at least: the first one that there is anything in.
    return min(max(_whole(end), _whole(int(every[0])) + rollups.BASE), final)


def _old_rows(
    connection: Connection, run: int, rank: int, metrics: Sequence[int], starts: Sequence[int]
) -> list[Mapping[int, rollups.Buckets]]:
    """The row of each level and series that goes on at a step, by level and series."""
    t = schema.rollup
    wanted = [
        (level, start // rollups.width(level) // rollups.ROW)
        for level, start in enumerate(starts)
        if start % (rollups.width(level) * rollups.ROW)
    ]
    of: dict[int, list[Any]] = defaultdict(list)
    if wanted and metrics:
        rows = connection.execute(
            select(t).where(
                *(t.c.run == run, t.c.metric.in_(metrics), t.c.rank == rank),
                or_(*(and_(t.c.level == level, t.c.block == block) for level, block in wanted)),
            )
        )
        for row in rows:
            of[row.level].append(row)
    return [rollups.by_metric(of[level], level) for level in range(rollups.LEVELS)]


def _write(
    connection: Connection, run: int, made: Sequence[_Rolled], metrics: Sequence[int]
) -> None:
    t = schema.rollup
    for rolled in made:
        for level, first, last in rolled.blocks:
            connection.execute(
                delete(t).where(
                    *(t.c.run == run, t.c.metric.in_(metrics), t.c.level == level),
                    *(t.c.rank == rolled.rank, t.c.block >= first, t.c.block <= last),
                )
            )
    rows = [row for rolled in made for row in rolled.rows]
    if rows:
        connection.execute(insert(t), rows)
