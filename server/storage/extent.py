"""From which step to which each rank has a series: two looks into an index each, however long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, ScalarSelect, Table, select, true

from rankscope.server.storage import schema


def extents(connection: Connection, table: Table, *, run: int, kind: str) -> Sequence[Any]:
    """Rows of (number and name of the series, rank, first_step, last_step), by name and rank.

    Args:
        table: where the points are, `chunk` or `layers`.
        kind: of the series in the run's dictionary.
    """
    m, a, c = schema.metric, schema.attempt, table.c
    ranks = select(a.c.rank).where(a.c.run == run).distinct().subquery()

    def one(column: Any, *order: Any) -> ScalarSelect[Any]:
        return (
            select(column)
            .where(c.run == run, c.metric == m.c.id, c.rank == ranks.c.rank)
            .order_by(*order)
            .limit(1)
            .scalar_subquery()
            .correlate(m, ranks)
        )

    first = one(c.first_step, c.first_step)
    # Of what begins last the end; only points that came out of order could lie behind it.
    last = one(c.last_step, c.first_step.desc(), c.arrival.desc())
    found = (
        select(
            m.c.id.label("number"),
            m.c.name,
            ranks.c.rank,
            first.label("first_step"),
            last.label("last_step"),
        )
        .join(ranks, true())
        .where(m.c.run == run, m.c.kind == kind)
        .subquery()
    )
    return connection.execute(
        select(found)
        .where(found.c.first_step.is_not(None))
        .order_by(found.c.name, found.c.number, found.c.rank)
    ).all()
