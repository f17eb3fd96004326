"""Long rows of `chunk` made of short ones, which keep which of their steps came when.

A rank that posts each step by itself leaves a row a step: views read hundreds of rows a rank where
one would do. Rows that were rolled up are merged in two goes, so that also the newest steps of a
run, at which people look most, lie in few rows: of each 32 steps first, and of each 512 then.

A merged row stands where its first part stood, with that one's arrival. `merged_chunk` keeps the
arrivals of all, by which the evaluation reads them (`columns.py`) as it would have read the parts,
whenever it begins again. Of a step that came twice the later one stands, so that a row is left as
it is where it holds a step that another one of the same process holds, too. What comes later yet
stands behind a merged row as behind its parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement, groupby
from typing import Any

import numpy as np
from sqlalchemy import Connection, Delete, Table, bindparam, case, delete, func, select

from rankscope.agent.wire import Int64
from rankscope.server.storage import schema
from rankscope.server.storage.database.bulk import Row, add_rows
from rankscope.server.storage.database.packing import (
    pack,
    pack_parts,
    pack_steps,
    unpack,
    unpack_parts,
    unpack_steps,
)
from rankscope.server.storage.ingest.dictionary import read_layouts
from rankscope.server.storage.maintenance import watermarks

# Steps that are merged, for each tier, and how many a row may have to be worth it.
_STEPS = (32, 512)
_SHORT = (16, 47)
SHORT = _SHORT[-1]
# SQLite reads a row as a whole to cut one series out of it.
_MAX_BYTES = 48 * 1024
# From the first part's arrival to the last one's: who begins to read in between has to find it.
MAX_SPAN = 1 << 20
# Of a rank at once, and rows of all: batches wait while they are written.
_STEPS_AT_ONCE = 2048
_ROWS_AT_ONCE = 4000


class Overtaken(Exception):
    """Rows have changed since they were read; nothing may be written of what was made of them."""


@dataclass(slots=True)
class Merge:
    """Rows of one set of series of one rank, one behind the other, that become one."""

    layout: int
    rank: int
    attempt: int
    rows: list[Any] = field(default_factory=list)
    bytes: int = 0

    def takes(self, row: Any, size: int) -> bool:
        """Whether a row can come next."""
        last = self.rows[-1]
        return bool(
            row.attempt == self.attempt
            and row.first_step > last.last_step
            and row.arrival > last.last_arrival
            and row.last_arrival - self.rows[0].arrival < MAX_SPAN
            and self.bytes + size <= _MAX_BYTES
        )


@dataclass(frozen=True, slots=True)
class Merged:
    """What is written for rows that become one.

    Attributes:
        chunk, merged: its rows of `chunk` and `merged_chunk`.
        again: how many of the rows were merged ones before.
    """

    of: Merge
    chunk: Row
    merged: Row
    again: int


def due(watermark: watermarks.RankWatermark) -> bool:
    """Whether a rank has steps that were rolled up and not examined here."""
    return any(_end(watermark, tier) > done for tier, done in enumerate(watermark.merged))


def moved_back(watermark: watermarks.RankWatermark, step: int) -> None:
    """Something has come at a step that may lie before the watermark."""
    for tier, steps in enumerate(_STEPS):
        watermark.merged[tier] = min(watermark.merged[tier], step // steps * steps)


def make(connection: Connection, run: int, watermark: watermarks.Watermark) -> list[Merged]:
    """Merges rows of some ranks, the furthest behind first, and advances their watermarks."""
    made: list[Merged] = []
    if not any(due(of) for of in watermark.ranks.values()):
        return made
    layouts = read_layouts(connection, run=run)
    left = _ROWS_AT_ONCE
    # The longest first: what becomes that is not made short of before.
    for tier in reversed(range(watermarks.TIERS)):
        # Ranks in step are read together: a query costs as much as dozens of rows.
        together: dict[tuple[int, int], list[int]] = defaultdict(list)
        for rank, of in sorted(watermark.ranks.items()):
            of.merged[tier] = begin = max(of.merged[tier:])
            end = _end(of, tier)
            if of.short < begin:
                of.merged[tier] = max(begin, end)
            elif begin < end:
                together[begin, min(end, begin + _STEPS_AT_ONCE)].append(rank)
        for (begin, end), ranks in sorted(together.items()):
            some = max(1, _ROWS_AT_ONCE // (end - begin))
            while ranks and left > 0:
                now, ranks = ranks[:some], ranks[some:]
                found = _rows(connection, run, now, layouts, begin, end, watermark)
                left -= max(sum(map(len, found.values())), 1)
                chosen: list[Merge] = []
                for rank in now:
                    own, of, stop = found.get(rank, []), watermark.ranks[rank], end
                    if not any(row.first_step >= begin for row in own):
                        stop = _next(connection, run, rank, layouts, end, _end(of, tier), tier)
                    for one in _chosen(own, rank, layouts, watermark.arrival, tier, begin):
                        length = one.rows[-1].last_step - one.rows[0].first_step
                        of.longest = max(of.longest, length)
                        chosen.append(one)
                    of.merged[tier] = stop
                if chosen:
                    made += _merged(connection, run, chosen, layouts)
    return made


def write(connection: Connection, run: int, made: Sequence[Merged]) -> None:
    """Puts merged rows into the places of those that they were made of.

    Raises:
        Overtaken: these are not there any more as they were.
    """
    for table, counts in (
        (schema.chunk, [len(one.of.rows) for one in made]),
        (schema.merged_chunk, [one.again for one in made]),
    ):
        gone = [
            {
                "its_run": run,
                "its_layout": one.of.layout,
                "its_rank": one.of.rank,
                "from_step": one.of.rows[0].first_step,
                "to_step": one.of.rows[-1].first_step,
                "from_arrival": one.of.rows[0].arrival,
                "to_arrival": one.of.rows[-1].arrival,
                "its_attempt": one.of.attempt,
            }
            for one, count in zip(made, counts, strict=True)
            if count
        ]
        # What comes meanwhile has later arrivals: rows can have gone, and none have come.
        if gone and connection.execute(_gone(table), gone).rowcount != sum(counts):
            raise Overtaken
    add_rows(connection, schema.chunk, [one.chunk for one in made])
    add_rows(connection, schema.merged_chunk, [one.merged for one in made])


def _gone(table: Table) -> Delete:
    c = table.c
    statement = delete(table).where(
        *(c.run == bindparam("its_run"), c.layout == bindparam("its_layout")),
        *(c.rank == bindparam("its_rank"), c.first_step >= bindparam("from_step")),
        *(c.first_step <= bindparam("to_step"), c.arrival >= bindparam("from_arrival")),
        c.arrival <= bindparam("to_arrival"),
    )
    if "attempt" in c:
        # A rank's processes may have been numbered anew.
        statement = statement.where(c.attempt == bindparam("its_attempt"))
    return statement


def _end(watermark: watermarks.RankWatermark, tier: int) -> int:
    return watermark.end // _STEPS[tier] * _STEPS[tier]


def _rows(
    connection: Connection,
    run: int,
    ranks: Sequence[int],
    layouts: Mapping[int, Any],
    begin: int,
    end: int,
    watermark: watermarks.Watermark,
) -> Mapping[int, list[Any]]:
    """Rows that hold steps from `begin` on and begin before `end`, by rank; not their values."""
    c, m = schema.chunk.c, schema.merged_chunk.c
    longest = max(watermark.ranks[rank].longest for rank in ranks)
    rows = connection.execute(
        select(
            *(c.layout, c.rank, c.attempt, c.first_step, c.last_step, c.arrival, c.points, c.steps),
            func.coalesce(m.last_arrival, c.arrival).label("last_arrival"),
        )
        .outerjoin(
            schema.merged_chunk,
            (m.run == c.run)
            & (m.layout == c.layout)
            & (m.rank == c.rank)
            & (m.first_step == c.first_step)
            & (m.arrival == c.arrival),
        )
        .where(
            *(c.run == run, c.layout.in_(layouts), c.rank.in_(ranks)),
            *(c.first_step >= begin - longest, c.first_step < end, c.last_step >= begin),
        )
        .order_by(c.layout, c.rank, c.first_step, c.arrival)
    )
    found: dict[int, list[Any]] = defaultdict(list)
    for row in rows:
        found[row.rank].append(row)
    return found


def _next(
    connection: Connection,
    run: int,
    rank: int,
    layouts: Mapping[int, Any],
    begin: int,
    end: int,
    tier: int,
) -> int:
    """Where a tier goes on behind a gap: at most at `end`."""
    c = schema.chunk.c
    found = connection.scalar(
        select(func.min(c.first_step)).where(
            c.run == run, c.layout.in_(layouts), c.rank == rank, c.first_step >= begin
        )
    )
    return end if found is None else min(end, found // _STEPS[tier] * _STEPS[tier])


def _chosen(
    rows: Sequence[Any],
    rank: int,
    layouts: Mapping[int, tuple[int, ...]],
    arrival: int,
    tier: int,
    begin: int,
) -> Iterator[Merge]:
    """What is worth to be merged: rows without another one of their series' in between."""
    clashing = _clashing(rows, layouts)
    for layout, some in groupby(enumerate(rows), key=lambda entry: entry[1].layout):
        width = 8 * len(layouts[layout])
        made: Merge | None = None
        block = -1
        for n, row in some:
            fits = (
                row.points <= _SHORT[tier]
                and row.first_step >= begin
                and row.last_arrival <= arrival
                and n not in clashing
            )
            size = width * row.points
            same = row.first_step // _STEPS[tier] == block
            if made is not None and not (fits and same and made.takes(row, size)):
                if len(made.rows) > 1:
                    yield made
                made = None
            if not fits:
                continue
            if made is None:
                made = Merge(layout, rank, row.attempt)
                block = row.first_step // _STEPS[tier]
            made.rows.append(row)
            made.bytes += size
        if made is not None and len(made.rows) > 1:
            yield made


def _clashing(rows: Sequence[Any], layouts: Mapping[int, tuple[int, ...]]) -> set[int]:
    """Places of rows that hold a step of a series that another row of the process holds, too."""
    found: set[int] = set()
    by_attempt: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for n, row in enumerate(rows):
        by_attempt[row.attempt][row.layout].append(n)
    for of in by_attempt.values():
        sets = {layout: set(layouts[layout]) for layout in of}
        for a, b in combinations_with_replacement(of, 2):
            if not sets[a].isdisjoint(sets[b]):
                found |= _sharing(rows, of[a] if a == b else of[a] + of[b])
    return found


def _sharing(rows: Sequence[Any], among: Sequence[int]) -> set[int]:
    """Of rows at some places those that hold a step that another one of these holds, too."""
    ends = np.array([(rows[n].first_step, rows[n].last_step) for n in among])
    ends = ends[np.argsort(ends[:, 0], kind="stable")]
    if bool((ends[1:, 0] > np.maximum.accumulate(ends[:-1, 1])).all()):
        return set()
    held = [unpack_steps(rows[n].steps, rows[n].first_step, rows[n].points) for n in among]
    of = np.repeat(np.array(among), [len(steps) for steps in held])
    _, which, counts = np.unique(np.concatenate(held), return_inverse=True, return_counts=True)
    return set(of[counts[which] > 1].tolist())


def _merged(
    connection: Connection, run: int, some: Sequence[Merge], layouts: Mapping[int, tuple[int, ...]]
) -> Iterator[Merged]:
    """The rows, with the values of what they are made of."""
    begin = min(one.rows[0].first_step for one in some)
    end = max(one.rows[-1].first_step for one in some)

    def read(table: Table, column: Any) -> dict[tuple[int, int, int, int], bytes]:
        c = table.c
        found = connection.execute(
            select(c.layout, c.rank, c.first_step, c.arrival, column).where(
                *(c.run == run, c.layout.in_({one.layout for one in some})),
                c.rank.in_({one.rank for one in some}),
                *(c.first_step >= begin, c.first_step <= end),
            )
        )
        return {(layout, rank, step, arrival): data for layout, rank, step, arrival, data in found}

    longest = max(row.points for one in some for row in one.rows)
    c = schema.chunk.c
    values = read(schema.chunk, case((c.points <= longest, c["values"])).label("values"))
    parts = read(schema.merged_chunk, schema.merged_chunk.c.parts)
    for one in some:
        yield _merge(one, run, len(layouts[one.layout]), values, parts)


def _merge(
    of: Merge,
    run: int,
    series: int,
    values: Mapping[tuple[int, int, int, int], bytes],
    parts: Mapping[tuple[int, int, int, int], bytes],
) -> Merged:
    keys = [(of.layout, of.rank, row.first_step, row.arrival) for row in of.rows]
    steps = np.concatenate([unpack_steps(row.steps, row.first_step, row.points) for row in of.rows])
    # As bits: NaN says more than that it is none.
    columns = [unpack(values[key], np.uint64).reshape(series, -1) for key in keys]
    arrivals: list[Int64] = []
    counts: list[Int64] = []
    for key, row in zip(keys, of.rows, strict=True):
        reported = (np.array([row.arrival]), np.array([row.points]))
        if key in parts:
            reported = unpack_parts(parts[key], row.arrival)
        arrivals.append(reported[0])
        counts.append(reported[1])
    when, first = np.concatenate(arrivals), of.rows[0]
    place = (run, of.layout, of.rank, first.first_step, first.arrival)
    return Merged(
        of,
        (
            *(*place, int(steps[-1]), of.attempt, len(steps)),
            *(pack_steps(steps), pack(np.concatenate(columns, axis=1))),
        ),
        (*place, int(when[-1]), pack_parts(when, np.concatenate(counts))),
        sum(key in parts for key in keys),
    )
