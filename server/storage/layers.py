"""Numbers for each tensor of a table: which there are, and those of one tensor as a series."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, LargeBinary, Select, case, func, select

from rankscope.server.storage import schema
from rankscope.server.storage.extent import layer_extents
from rankscope.server.storage.tables import load_tables


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
    """A line of the run's dictionary: `names` are those of its tensors."""

    number: int
    metric: str
    table: str
    names: tuple[str, ...]


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
    later = _versions_told(connection, run) if late else {}
    version_of = {row.id: row.version or later.get(row.table, "") for row in rows}
    tables = load_tables(connection, run=run, versions={*version_of.values()} - {""})
    return [
        _Entry(row.id, row.name, row.table, tables[version_of[row.id]].names)
        for row in rows
        if version_of[row.id] in tables
    ]


def _versions_told(connection: Connection, run: int) -> dict[str, str]:
    a = schema.attempt
    told: dict[str, str] = {}
    for tables in connection.scalars(
        select(a.c.tables).where(a.c.run == run).order_by(a.c.rank, a.c.attempt)
    ):
        told = {**tables, **told}
    return told
