"""Numbers for each tensor of a table: which there are, and those of one tensor as a series."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import Connection, LargeBinary, Select, case, func, select

from rankscope.agent.wire import Float64, Int64, TensorTable
from rankscope.server.storage import schema
from rankscope.server.storage.database.packing import unpack, unpack_steps
from rankscope.server.storage.ingest.tables import load_tables
from rankscope.server.storage.reading.extent import layer_extents, together
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
    extent = layer_extents(connection, run=run)
    entries: dict[tuple[str, str], list[_Entry]] = defaultdict(list)
    for entry in _entries(connection, run):
        if entry.number in extent:
            entries[entry.metric, entry.table].append(entry)
    families = []
    for (metric, table), versions in sorted(entries.items()):
        ranks, first_step, last_step = together(extent[entry.number] for entry in versions)
        families.append(
            Family(
                metric=metric,
                table=table,
                # Of all versions of the table, what is there now first.
                tensors=tuple(
                    dict.fromkeys(name for entry in reversed(versions) for name in entry.names)
                ),
                ranks=ranks,
                first_step=first_step,
                last_step=last_step,
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


def read_family(
    connection: Connection,
    *,
    run: int,
    metric: str,
    table: str,
    rank: int | None = None,
    from_step: int | None = None,
    to_step: int | None = None,
) -> tuple[int, tuple[str, ...], Int64, Float64] | None:
    """One metric of all tensors of a table, as one rank reported it.

    Args:
        rank: None for the first one that has it.

    Returns:
        The rank, the names [T] of the tensors that are there now, the steps int64 [S], ascending,
        and the values float64 [T, S]: NaN where a tensor was not there, infinity for what was
        posted and is not finite. None where nobody has posted any at these steps.
    """
    entries = {e.number: e for e in _entries(connection, run, (metric,)) if e.table == table}
    if not entries:
        return None
    c = schema.layers.c
    there = [c.run == run, c.metric.in_(entries)]
    if from_step is not None:
        there.append(c.last_step >= from_step)
    if to_step is not None:
        there.append(c.first_step <= to_step)
    if rank is None:
        rank = connection.scalar(select(func.min(c.rank)).where(*there))
    rows = connection.execute(
        select(c.metric, c.first_step, c.points, c.tensors, c.steps, c["values"])
        .where(*there, c.rank == rank)
        .order_by(c.attempt, c.arrival)
    ).all()
    names = entries[max(entries)].names
    place = {name: row for row, name in enumerate(names)}
    parts: list[tuple[Int64, Float64]] = []
    for row in rows:
        entry = entries[row.metric]
        if len(entry.names) != row.tensors:
            continue  # its table was never reported
        posted = unpack(row.values, np.float64).reshape(row.tensors, row.points)
        values = np.full((len(names), row.points), np.nan)
        known = [n for n, name in enumerate(entry.names) if name in place]
        to = [place[entry.names[n]] for n in known]
        values[to] = np.where(np.isfinite(posted[known]), posted[known], np.inf)
        parts.append((unpack_steps(row.steps, row.first_step, row.points), values))
    if not parts or rank is None:
        return None
    steps = np.concatenate([of for of, _ in parts])
    values = np.concatenate([of for _, of in parts], axis=1)
    # Where a step was done twice, what came last stands.
    order = np.argsort(steps, kind="stable")
    stands = order[np.append(steps[order][1:] > steps[order][:-1], True)]
    low, high = from_step or 0, np.inf if to_step is None else to_step
    inside = stands[(steps[stands] >= low) & (steps[stands] <= high)]
    return (int(rank), names, steps[inside], values[:, inside]) if inside.size else None


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
