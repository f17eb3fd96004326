"""Numbers for each tensor of a table: which there are, and those of one tensor as a series."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import Connection, LargeBinary, Select, case, func, select

from rankscope.agent.wire import TensorTable
from rankscope.server.storage import schema
from rankscope.server.storage.database.packing import unpack, unpack_steps
from rankscope.server.storage.ingest.tables import load_tables
from rankscope.server.storage.reading.extent import layer_extents
from rankscope.server.window import LayerPart

# Replicas have the same layers: what the first ranks say of them is what all would say.
_RANKS = 4
# Bytes after which no more batches are read.
_PAGE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Family:
    """One metric of the tensors of a table.

    Attributes:
        tensors: their names, in the table's order.
        ranks: those that have posted it, ascending.
    """

    metric: str
    table: str
    tensors: tuple[str, ...]
    ranks: tuple[int, ...]
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """A line of the run's dictionary, with the table that it speaks of."""

    number: int
    metric: str
    table: str
    tensors: TensorTable

    @property
    def names(self) -> tuple[str, ...]:
        return self.tensors.names


def list_families(connection: Connection, *, run: int) -> list[Family]:
    """All numbers of tensors of a run, by metric and table."""
    extent: dict[int, list[Any]] = defaultdict(list)
    for row in layer_extents(connection, run=run):
        extent[row.number].append(row)
    entries: dict[tuple[str, str], list[_Entry]] = defaultdict(list)
    for entry in _entries(connection, run):
        if entry.number in extent:
            entries[entry.metric, entry.table].append(entry)
    families = []
    for (metric, table), versions in sorted(entries.items()):
        rows = [row for entry in versions for row in extent[entry.number]]
        families.append(
            Family(
                metric=metric,
                table=table,
                # Of all versions of the table, what is there now first.
                tensors=tuple(
                    dict.fromkeys(name for entry in reversed(versions) for name in entry.names)
                ),
                ranks=tuple(sorted({row.rank for row in rows})),
                first_step=min(row.first_step for row in rows),
                last_step=max(row.last_step for row in rows),
            )
        )
    return families


def points(connection: Connection, *, run: int, name: str) -> Select[Any] | None:
    """Rows as those of `chunk`, of the tensor that a series is called after; None: there is none.

    Args:
        name: `<metric>/<tensor>`, of which both may have a slash.
    """
    tensor_of = {name[:at]: name[at + 1 :] for at, letter in enumerate(name) if letter == "/"}
    places = {
        entry.number: entry.names.index(tensor_of[entry.metric])
        for entry in _entries(connection, run, tuple(tensor_of))
        if tensor_of[entry.metric] in entry.names
    }
    if not places:
        return None
    c = schema.layers.c
    place = case(places, value=c.metric)
    # The steps of a tensor stand together: no more is read of a row than these.
    values = func.substr(c["values"], place * c.points * 8 + 1, c.points * 8, type_=LargeBinary)
    return select(
        c.rank,
        c.first_step,
        c.last_step,
        c.attempt,
        c.arrival,
        c.points,
        c.steps,
        values.label("values"),
    ).where(c.run == run, c.metric.in_(places), place < c.tensors)


def load_new(
    connection: Connection,
    *,
    run: int,
    after: int,
    until: int,
    metrics: Collection[str],
    beyond: int,
) -> tuple[list[tuple[int, LayerPart]], int]:
    """What the first ranks posted that arrived after `after` and up to `until`.

    Args:
        metrics: those that are wanted.
        beyond: batches that begin at this step or before are not examined. There is no index by
            arrival: it is this that keeps what has been read from being gone through again.

    Returns:
        Parts with their arrivals, in that order, and the arrival up to which they were read.
    """
    m, c = schema.metric.c, schema.layers.c
    numbers = connection.scalars(
        select(m.id).where(m.run == run, m.kind == "layers", m.name.in_(metrics))
    ).all()
    if not numbers:
        return [], until
    found = connection.execute(
        select(schema.layers)
        .where(
            c.run == run,
            c.metric.in_(numbers),
            c.rank < _RANKS,
            c.first_step > beyond,
            c.arrival > after,
            c.arrival <= until,
        )
        .order_by(c.arrival, c.metric)
        .execution_options(yield_per=64)
    )
    rows: list[Any] = []
    size = 0
    with found:
        for row in found:
            if size > _PAGE_BYTES and row.arrival > rows[-1].arrival:
                until = int(rows[-1].arrival)
                break
            rows.append(row)
            size += len(row.values)
    if not rows:
        return [], until
    entries = {entry.number: entry for entry in _entries(connection, run, tuple(metrics))}
    parts = []
    for row in rows:
        entry = entries.get(row.metric)
        if entry is None or len(entry.names) != row.tensors:
            continue  # its table was never reported
        part = LayerPart(
            rank=row.rank,
            attempt=row.attempt,
            metric=entry.metric,
            name=entry.table,
            table=entry.tensors,
            steps=unpack_steps(row.steps, row.first_step, row.points),
            values=unpack(row.values, np.float64).reshape(row.tensors, row.points),
        )
        parts.append((int(row.arrival), part))
    return parts, until


def _entries(
    connection: Connection, run: int, metrics: Sequence[str] | None = None
) -> list[_Entry]:
    """The dictionary's lines, in the order in which they came."""
    m = schema.metric
    query = select(m).where(m.c.run == run, m.c.kind == "layers").order_by(m.c.id)
    if metrics is not None:
        query = query.where(m.c.name.in_(metrics))
    rows = connection.execute(query).all()
    # What came before its table did is of the one that came then.
    late = {row.table for row in rows if not row.version}
    later = _newest_versions(connection, run) if late else {}
    version_of = {row.id: row.version or later.get(row.table, "") for row in rows}
    tables = load_tables(connection, run=run, versions={*version_of.values()} - {""})
    return [
        _Entry(row.id, row.name, row.table, tables[version_of[row.id]])
        for row in rows
        if version_of[row.id] in tables
    ]


def _newest_versions(connection: Connection, run: int) -> dict[str, str]:
    a = schema.attempt
    reported: dict[str, str] = {}
    for tables in connection.scalars(
        select(a.c.tables).where(a.c.run == run).order_by(a.c.rank, a.c.attempt)
    ):
        reported = {**tables, **reported}
    return reported
