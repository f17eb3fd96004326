"""From which step to which each rank has a series: two looks into an index each, however long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Column, Connection, ScalarSelect, Select, select, true

from rankscope.server.storage import schema
from rankscope.server.storage.ingest.dictionary import read_layouts


class Extent(NamedTuple):
    """First and last step of one series of one rank; `number` is that of the series."""

    number: int
    name: str
    rank: int
    first_step: int
    last_step: int


def scalar_extents(connection: Connection, *, run: int) -> list[Extent]:
    """Those of scalars, by name and rank."""
    of = schema.layout.c
    layouts = read_layouts(connection, run=run)
    ends: dict[tuple[int, int], tuple[int, int]] = {}
    for row in ends_of(connection, schema.chunk.c.layout, select(of.id).where(of.run == run), run):
        for metric in layouts[row.number]:
            first, last = ends.get((metric, row.rank), (row.first_step, row.last_step))
            ends[metric, row.rank] = (min(first, row.first_step), max(last, row.last_step))
    return _named(connection, ends, run=run, kind="scalar")


def layer_extents(connection: Connection, *, run: int) -> list[Extent]:
    """Those of numbers for each tensor of a table, by name, number and rank."""
    m = schema.metric.c
    numbers = select(m.id).where(m.run == run, m.kind == "layers")
    ends = {
        (row.number, row.rank): (row.first_step, row.last_step)
        for row in ends_of(connection, schema.layers.c.metric, numbers, run)
    }
    return _named(connection, ends, run=run, kind="layers")


def ends_of(
    connection: Connection, column: Column[int], numbers: Select[tuple[int]], run: int
) -> Sequence[Any]:
    """Rows of (number, rank, first_step, last_step), for each number and rank that is there.

    Args:
        column: what the rows of its table are numbered by, after the run and before the rank.
    """
    a, c = schema.attempt.c, column.table.c
    ranks = select(a.rank).where(a.run == run).distinct().subquery()
    wanted = numbers.subquery()

    def one(of: Any, *order: Any) -> ScalarSelect[Any]:
        return (
            select(of)
            .where(c.run == run, column == wanted.c.id, c.rank == ranks.c.rank)
            .order_by(*order)
            .limit(1)
            .scalar_subquery()
            .correlate(wanted, ranks)
        )

    found = (
        select(
            wanted.c.id.label("number"),
            ranks.c.rank,
            one(c.first_step, c.first_step).label("first_step"),
            # Of what begins last the end; only points that came out of order could lie behind it.
            one(c.last_step, c.first_step.desc(), c.arrival.desc()).label("last_step"),
        )
        .join(ranks, true())
        .subquery()
    )
    return connection.execute(select(found).where(found.c.first_step.is_not(None))).all()


def _named(
    connection: Connection, ends: Mapping[tuple[int, int], tuple[int, int]], *, run: int, kind: str
) -> list[Extent]:
    m = schema.metric.c
    rows = connection.execute(select(m.id, m.name).where(m.run == run, m.kind == kind))
    names = {row.id: row.name for row in rows}
    found = [
        Extent(number, names[number], rank, first, last)
        for (number, rank), (first, last) in ends.items()
        if number in names
    ]
    return sorted(found, key=lambda extent: (extent.name, extent.number, extent.rank))
