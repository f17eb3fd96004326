"""Points of one series as they came, of many ranks at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from sqlalchemy import Connection, LargeBinary, Select, case, func, select

from rankscope.agent.wire import Float64, Int64
from rankscope.server.storage import schema
from rankscope.server.storage.marks import Mark
from rankscope.server.storage.packing import unpack, unpack_steps


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
    mark: Mark,
    first: int,
    last: int,
) -> Points:
    """Points of a series from step `first` to `last`, both included.

    Where a step was done twice, by an attempt and by a later one, the later one stands; within one
    attempt what came later.

    Args:
        places: where the series stands in each layout that it is in.
        mark: as it is in this transaction.
    """
    c = schema.chunk.c
    wanted = list(ranks)
    longest = max((mark.ranks[r].longest for r in wanted if r in mark.ranks), default=0)
    read = _values(places).where(c.run == run)
    # What the mark speaks of lies in a range of the primary key.
    known = read.where(
        *(c.layout.in_(places), c.rank.in_(wanted), c.arrival + 0 <= mark.arrival),
        *(c.first_step >= first - longest, c.first_step <= last, c.last_step >= first),
    )
    # The sums keep the planner from the primary key: little has come since, of a long run.
    new = read.where(
        *((c.layout + 0).in_(places), (c.rank + 0).in_(wanted), c.arrival > mark.arrival),
        *(c.first_step + 0 <= last, c.last_step >= first),
    )
    rows = [*(connection.execute(known) if mark.number else ()), *connection.execute(new)]
    return merged(rows, first, last)


def merged(rows: Sequence[Any], first: int, last: int) -> Points:
    """Points of rows from step `first` to `last`, each step of a rank once."""
    if not rows:
        return Points(_NO_STEPS, _NO_STEPS, _NO_VALUES)
    # Not by the database, which would carry the values through its sorting.
    rows = sorted(rows, key=attrgetter("rank", "attempt", "arrival"))
    count = np.array([row.points for row in rows], np.int64)
    rank = np.repeat(np.array([row.rank for row in rows], np.int64), count)
    begin = np.array([row.first_step for row in rows], np.int64)
    before = np.cumsum(count) - count
    steps = np.arange(len(rank), dtype=np.int64) + np.repeat(begin - before, count)
    for n, row in enumerate(rows):
        if row.steps is not None:
            a = int(before[n])
            steps[a : a + row.points] = unpack_steps(row.steps, row.first_step, row.points)
    values: Float64 = unpack(b"".join([row.values for row in rows]), np.float64)
    inside = (steps >= first) & (steps <= last)
    if not inside.all():
        rank, steps, values = rank[inside], steps[inside], values[inside]
    if not bool(((steps[1:] > steps[:-1]) | (rank[1:] > rank[:-1])).all()):
        order = np.lexsort((steps, rank))
        rank, steps, values = rank[order], steps[order], values[order]
        stands = np.append((steps[1:] > steps[:-1]) | (rank[1:] > rank[:-1]), True)
        rank, steps, values = rank[stands], steps[stands], values[stands]
    return Points(rank, steps, values)


def _values(places: Mapping[int, int]) -> Select[Any]:
    c = schema.chunk.c
    place = case(dict(places), value=c.layout)
    values = func.substr(c["values"], place * c.points * 8 + 1, c.points * 8, type_=LargeBinary)
    return select(
        *(c.rank, c.first_step, c.attempt, c.arrival, c.points, c.steps), values.label("values")
    )


_NO_STEPS = np.empty(0, np.int64)
_NO_VALUES = np.empty(0)
