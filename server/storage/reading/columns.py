"""Values of many ranks, read together: ranks in step post the same series at the same steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sqlalchemy import Connection, select

from rankscope.agent.wire import Int64
from rankscope.server.storage import schema
from rankscope.server.storage.database.packing import unpack, unpack_steps
from rankscope.server.storage.ingest.dictionary import read_layouts
from rankscope.server.storage.reading.arrivals import rows_as_they_came
from rankscope.server.window import Columns, is_wanted


@dataclass(slots=True)
class _Group:
    steps: Int64
    # Rank -> when it arrived, in the order of `values`.
    arrivals: dict[int, int] = field(default_factory=dict)
    values: list[bytes] = field(default_factory=list)


def load_columns(
    connection: Connection,
    *,
    run: int,
    after: int,
    until: int,
    wanted: Mapping[str, Collection[str] | None],
    enough: int,
) -> tuple[tuple[Columns, ...], tuple[Columns, ...], int]:
    """Scalars and digests that arrived after `after` and up to `until`.

    Args:
        wanted: names of series of each kind; None for all.
        enough: bytes after which no more batches are read.

    Returns:
        Scalars, digests, and the arrival up to which they were read.
    """
    m = schema.metric.c
    names = {
        row.id: (row.kind, row.name)
        for row in connection.execute(select(m.id, m.kind, m.name).where(m.run == run))
        if row.kind in wanted and _is_in(row.name, wanted[row.kind])
    }
    layouts = read_layouts(connection, run=run)
    places: dict[int, list[tuple[str, Int64, tuple[str, ...]]]] = {}
    for number, metrics in layouts.items():
        for kind in wanted:
            found = [n for n, key in enumerate(metrics) if names.get(key, ("",))[0] == kind]
            if found:
                reported = tuple(names[metrics[n]][1] for n in found)
                places.setdefault(number, []).append((kind, np.array(found), reported))
    groups: dict[tuple[int, int, int, int, bytes | None], list[_Group]] = {}
    rows = rows_as_they_came(connection, run=run, after=after, until=until, layouts=places)
    size, arrival = 0, after
    with closing(rows):
        for came, layout, rank, first, attempt, points, packed, values in rows:
            if size > enough and came > arrival:
                until = arrival
                break
            arrival = came
            size += 8 * points * sum(len(reported) for _, _, reported in places[layout])
            key = (layout, attempt, first, points, packed)
            same = groups.setdefault(key, [])
            if not same or rank in same[-1].arrivals:
                same.append(_Group(unpack_steps(packed, first, points)))
            same[-1].arrivals[rank] = came
            same[-1].values.append(values)
    made: dict[str, list[Columns]] = {"scalar": [], "word": []}
    for (layout, attempt, _, points, _), same in groups.items():
        for group in same:
            shape = (len(group.values), len(layouts[layout]), points)
            ranks = np.array(list(group.arrivals), dtype=np.int64)
            arrivals = np.array(list(group.arrivals.values()), dtype=np.int64)
            joined = b"".join(group.values)
            for kind, place, reported in places[layout]:
                dtype: type[Any] = np.uint64 if kind == "word" else np.float64
                # A copy: what waits for its step would hold all that came with it.
                held = unpack(joined, dtype).reshape(shape)[:, place]
                made[kind].append(Columns(ranks, arrivals, attempt, reported, group.steps, held))
    return tuple(made["scalar"]), tuple(made["word"]), until


def _is_in(name: str, among: Collection[str] | None) -> bool:
    return among is None or is_wanted(name, among)
