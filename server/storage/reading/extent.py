"""Who has which series, from which step to which: two looks into an index for each rank and set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Column, Connection, ScalarSelect, Select, select, true

from rankscope.server.storage import schema
from rankscope.server.storage.ingest.dictionary import read_layouts


class Extent(NamedTuple):
    """Ranks that have a series, ascending, and first and last step that any of them has of it."""

    ranks: tuple[int, ...]
    first_step: int
    last_step: int


def scalar_extents(connection: Connection, *, run: int) -> dict[str, Extent]:
    """Those of scalars, by name."""
    of, m = schema.layout.c, schema.metric.c
    ends = _by_number(
        ends_of(connection, schema.chunk.c.layout, select(of.id).where(of.run == run), run)
    )
    layouts: dict[int, list[int]] = {}
    for number, metrics in read_layouts(connection, run=run).items():
        for metric in metrics if number in ends else ():
            layouts.setdefault(metric, []).append(number)
    names: dict[str, list[int]] = {}
    rows = connection.execute(select(m.id, m.name).where(m.run == run, m.kind == "scalar"))
    for row in rows:
        if row.id in layouts:
            names.setdefault(row.name, []).extend(layouts[row.id])
    # Most series came in the same sets: of a thousand ranks each set is gone through once.
    known: dict[tuple[int, ...], Extent] = {}
    found = {}
    for name, numbers in sorted(names.items()):
        key = tuple(sorted(set(numbers)))
        if key not in known:
            known[key] = together(ends[number] for number in key)
        found[name] = known[key]
    return found


def layer_extents(connection: Connection, *, run: int) -> dict[int, Extent]:
    """Those of numbers for each tensor of a table, by their number."""
    m = schema.metric.c
    numbers = select(m.id).where(m.run == run, m.kind == "layers")
    return _by_number(ends_of(connection, schema.layers.c.metric, numbers, run))


def together(parts: Iterable[Extent]) -> Extent:
    """The extent of several, of which there is at least one."""
    first, *others = parts
    if not others:
        return first
    all_of = (first, *others)
    return Extent(
        tuple(sorted(set().union(*(one.ranks for one in all_of)))),
        min(one.first_step for one in all_of),
        max(one.last_step for one in all_of),
    )


def _by_number(ends: Sequence[Any]) -> dict[int, Extent]:
    """The extent of each number, of its ends by rank."""
    by_number: dict[int, list[tuple[int, int, int]]] = {}
    for number, rank, first, last in ends:
        by_number.setdefault(number, []).append((rank, first, last))
    found = {}
    for number, of in by_number.items():
        ranks, firsts, lasts = zip(*of, strict=True)
        found[number] = Extent(tuple(sorted(ranks)), min(firsts), max(lasts))
    return found


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
