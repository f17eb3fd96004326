"""Rows of `chunk` in the order in which they came, merged ones as the parts that came."""

from __future__ import annotations

from collections.abc import Collection, Generator
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from sqlalchemy import Connection, select

from rankscope.server.storage import schema
from rankscope.server.storage.database.packing import (
    pack,
    pack_steps,
    unpack,
    unpack_parts,
    unpack_steps,
)
from rankscope.server.storage.maintenance.merging import MAX_SPAN


class Came(NamedTuple):
    """A row as it came; see `schema.chunk`. They are in the order of the first two."""

    arrival: int
    layout: int
    rank: int
    first_step: int
    attempt: int
    points: int
    steps: bytes | None
    values: bytes


_C = schema.chunk.c
_READ = (
    *(_C.arrival, _C.layout, _C.rank, _C.first_step, _C.attempt, _C.points, _C.steps),
    _C["values"],
)


def rows_as_they_came(
    connection: Connection, *, run: int, after: int, until: int, layouts: Collection[int]
) -> Generator[Came, None, None]:
    """Rows of some sets of series that arrived after `after` and up to `until`.

    The caller closes it where it does not read it to its end.
    """
    m = schema.merged_chunk.c
    reaching = (
        *(m.run == run, m.last_arrival > after, m.last_arrival < until + MAX_SPAN),
        *(m.arrival <= until, m.layout.in_(layouts)),
    )
    merged = {
        (row.arrival, row.layout): row.parts
        for row in connection.execute(select(m.arrival, m.layout, m.parts).where(*reaching))
    }
    parts: list[Came] = []
    if merged:
        begun = select(*_READ).join(
            schema.merged_chunk,
            (_C.run == m.run)
            & (_C.layout == m.layout)
            & (_C.rank == m.rank)
            & (_C.first_step == m.first_step)
            & (_C.arrival == m.arrival),
        )
        for row in connection.execute(begun.where(*reaching, m.arrival <= after)):
            made = Came(*row)
            _add_parts(parts, made, merged[made[:2]], after, until)
    rows = connection.execute(
        select(*_READ)
        .where(_C.run == run, _C.arrival > after, _C.arrival <= until, _C.layout.in_(layouts))
        .order_by(_C.arrival, _C.layout)
        .execution_options(yield_per=64)
    )
    with rows:
        for row in rows:
            key = (row[0], row[1])
            while parts and parts[0][:2] < key:
                yield heappop(parts)
            if key in merged:
                _add_parts(parts, Came(*row), merged[key], after, until)
            else:
                yield Came(*row)
    while parts:
        yield heappop(parts)


def _add_parts(parts: list[Came], row: Came, packed: bytes, after: int, until: int) -> None:
    """Adds what came in time of a merged row to a heap."""
    arrivals, counts = unpack_parts(packed, row.arrival)
    ends = np.cumsum(counts).tolist()
    steps = unpack_steps(row.steps, row.first_step, row.points)
    # As bits: they may be digests.
    values = unpack(row.values, np.uint64).reshape(-1, row.points)
    first, end = np.searchsorted(arrivals, (after, until), side="right").tolist()
    for n in range(first, end):
        of = slice(ends[n] - int(counts[n]), ends[n])
        heappush(
            parts,
            row._replace(
                arrival=int(arrivals[n]),
                first_step=int(steps[of][0]),
                points=int(counts[n]),
                steps=pack_steps(steps[of]),
                values=pack(values[:, of]),
            ),
        )
