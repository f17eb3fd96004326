"""Points of one series as they came, of many ranks at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from sqlalchemy import Connection, LargeBinary, Select, case, func, select

from rankscope.agent.wire import Float64, Int64
from rankscope.server.storage import schema
from rankscope.server.storage.database.packing import unpack, unpack_steps
from rankscope.server.storage.maintenance.watermarks import Watermark


@dataclass(frozen=True, slots=True)
class Points:
    """Points of several ranks, by rank and step; int64, int64, float64 [N]."""

    rank: Int64
    steps: Int64
    values: Float64


def read_points(
    connection: Connection,
    *,
    run: int,
    places: Mapping[int, int],
    ranks: Collection[int],
    watermark: Watermark,
    first: int,
    last: int,
) -> Points:
    """Points of a series from step `first` to `last`, both included.

    Where a step was done twice, by an attempt and by a later one, the later one stands; within one
    attempt what came later.

    Args:
        places: where the series stands in each layout that it is in.
        watermark: as it is in this transaction.
    """
    return _merged(_rows(connection, run, places, ranks, watermark, first, last), first, last)


def read_each(
    connection: Connection,
    *,
    run: int,
    places: Mapping[int, int],
    ranks: Collection[int],
    watermark: Watermark,
    first: int,
    last: int,
) -> list[tuple[int, Int64, Float64]]:
    """The same, rank by rank: rank, steps and values; those with the same steps share the array."""
    by_rank: dict[int, list[Any]] = defaultdict(list)
    for row in _rows(connection, run, places, ranks, watermark, first, last):
        by_rank[row[0]].append(row)
    found: dict[int, tuple[Int64, Float64]] = {}
    known: dict[tuple[int, int], Int64] = {}
    others: list[Any] = []
    for rank, rows in by_rank.items():
        if not _follow(rows):
            others += rows
            continue
        # Nothing to sort, and of the steps nothing to be examined.
        begin = rows[0][3]
        values: Float64 = unpack(b"".join([row[6] for row in rows]), np.float64)
        low, high = max(first - begin, 0), min(last - begin + 1, len(values))
        if low < high:
            at = (begin + low, high - low)
            if at not in known:
                known[at] = unpack_steps(None, *at)
            found[rank] = known[at], values[low:high]
    rest = _merged(others, first, last)
    for rank, a, b in by_rank_of(rest.rank):
        found[rank] = rest.steps[a:b], rest.values[a:b]
    return [(rank, *found[rank]) for rank in sorted(found)]


def by_rank_of(rank: Int64) -> Iterator[tuple[int, int, int]]:
    """Each rank of an array in which they ascend, and from where to where it stands."""
    starts = np.flatnonzero(np.append(True, rank[1:] != rank[:-1])).tolist() if len(rank) else []
    for a, b in pairwise([*starts, len(rank)]):
        yield int(rank[a]), a, b


def _rows(
    connection: Connection,
    run: int,
    places: Mapping[int, int],
    ranks: Collection[int],
    watermark: Watermark,
    first: int,
    last: int,
) -> list[Any]:
    """Rows (`_values`) that may hold any of these steps."""
    c = schema.chunk.c
    wanted = list(ranks)
    longest = max((watermark.ranks[r].longest for r in wanted if r in watermark.ranks), default=0)
    read = _values(places).where(c.run == run)
    # What the watermark speaks of lies in a range of the primary key.
    known = read.where(
        *(c.layout.in_(places), c.rank.in_(wanted), c.arrival + 0 <= watermark.arrival),
        *(c.first_step >= first - longest, c.first_step <= last, c.last_step >= first),
    )
    # The sums keep the planner from the primary key: little has come since, of a long run.
    new = read.where(
        *((c.layout + 0).in_(places), (c.rank + 0).in_(wanted), c.arrival > watermark.arrival),
        *(c.first_step + 0 <= last, c.last_step >= first),
    )
    return [
        tuple(row)
        for one in ((known, new) if watermark.number else (new,))
        for row in connection.execute(one)
    ]


def _follow(rows: Sequence[Any]) -> bool:
    """Whether each row of a rank goes on where the one before it ends, with no step left out."""
    end = rows[0][3]
    for row in rows:
        if row[3] != end or row[5] is not None:
            return False
        end += row[4]
    return True


def _merged(rows: Sequence[Any], first: int, last: int) -> Points:
    """Points of rows (`_values`) from step `first` to `last`, each step of a rank once."""
    if not rows:
        return Points(_NO_STEPS, _NO_STEPS, _NO_VALUES)
    keys = np.array([row[:5] for row in rows], np.int64)
    # As of one set of series they mostly come.
    if not _ascend(keys):
        # Not by the database, which would carry the values through its sorting.
        order = np.lexsort((keys[:, 2], keys[:, 1], keys[:, 0]))
        keys, rows = keys[order], [rows[n] for n in order.tolist()]
    count, begin = keys[:, 4], keys[:, 3]
    rank = np.repeat(keys[:, 0], count)
    before = np.cumsum(count) - count
    steps = np.arange(len(rank), dtype=np.int64) + np.repeat(begin - before, count)
    for n, row in enumerate(rows):
        if row[5] is not None:
            a = int(before[n])
            steps[a : a + row[4]] = unpack_steps(row[5], row[3], row[4])
    values: Float64 = unpack(b"".join([row[6] for row in rows]), np.float64)
    inside = (steps >= first) & (steps <= last)
    if not inside.all():
        rank, steps, values = rank[inside], steps[inside], values[inside]
    if not bool(((steps[1:] > steps[:-1]) | (rank[1:] > rank[:-1])).all()):
        order = np.lexsort((steps, rank))
        rank, steps, values = rank[order], steps[order], values[order]
        stands = np.append((steps[1:] > steps[:-1]) | (rank[1:] > rank[:-1]), True)
        rank, steps, values = rank[stands], steps[stands], values[stands]
    return Points(rank, steps, values)


def _ascend(keys: Int64) -> bool:
    """Whether rows are in the order of rank, attempt and arrival."""
    rank, attempt, arrival = keys[1:, :3].T - keys[:-1, :3].T
    return bool(
        ((rank > 0) | (rank == 0) & ((attempt > 0) | (attempt == 0) & (arrival >= 0))).all()
    )


def _values(places: Mapping[int, int]) -> Select[Any]:
    c = schema.chunk.c
    place = case(dict(places), value=c.layout)
    values = func.substr(c["values"], place * c.points * 8 + 1, c.points * 8, type_=LargeBinary)
    return select(
        *(c.rank, c.attempt, c.arrival, c.first_step, c.points, c.steps), values.label("values")
    )


_NO_STEPS = np.empty(0, np.int64)
_NO_VALUES = np.empty(0)
