"""Points of one series as they came, of many ranks at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
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
    rows = [
        tuple(row)
        for one in ((known, new) if mark.number else (new,))
        for row in connection.execute(one)
    ]
    return _merged(rows, first, last)


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
