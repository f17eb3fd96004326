"""Looks through a whole database for what cannot be as it is: damaged pages, rows that do not fit.

What is stored of points has no checksum of its own, but every row says how much its columns hold,
and what fingerprints say is stored under a hash of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import Engine, Select, Table, func, select
from sqlalchemy.exc import DatabaseError

from rankscope.agent import wire
from rankscope.server.storage import schema
from rankscope.server.storage.database.engine import reading, why
from rankscope.server.storage.database.packing import unpack, unpack_parts, unpack_steps
from rankscope.server.storage.ingest.fingerprints import content_of
from rankscope.server.storage.maintenance.pruning import belonging

# Rows that are held at a time.
_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that cannot be as it is.

    Attributes:
        run: id of the run that it belongs to; empty where that is not known.
        text: in words, with the table that it stands in.
    """

    run: str
    text: str


@dataclass(frozen=True, slots=True)
class Contents:
    """What a database holds: numbers of runs, of rows that belong to them, and of stored values."""

    runs: int
    rows: int
    values: int


def look_through(engine: Engine, say: Callable[[Damage], None]) -> Contents:
    """Reads all of a database, and tells what is wrong with it; it is not changed.

    Args:
        say: is called with each thing that is wrong, at most once for each table and run.
    """
    if engine.dialect.name == "sqlite":
        for text in _pages(engine):
            say(Damage("", text))
    runs, rows, values = 0, 0, 0
    with reading(engine) as connection:
        ids = {row.key: row.id for row in connection.execute(select(schema.run_name))}
        known = {row.key for row in connection.execute(select(schema.run.c.key))}
        runs = len(known)
        for table in belonging():
            count = connection.execute(select(table.c.run, func.count()).group_by(table.c.run))
            for run, number in count:
                rows += number
                if run not in known:
                    name = ids.get(run, "")
                    say(Damage(name, f"{table.name}: {number} rows of a run that is not there"))
    for table, fit in _FITS.items():
        said: set[int] = set()
        try:
            for row in _rows(engine, table):
                try:
                    values += fit(row)
                except (ValueError, zlib.error) as error:
                    if row.run not in said:
                        said.add(row.run)
                        at = _place(table, row)
                        say(Damage(ids.get(row.run, ""), f"{table.name}, {at}: {error}"))
        except DatabaseError as error:
            say(Damage("", f"{table.name} cannot be read: {why(error)}"))
    return Contents(runs, rows, values)


def _pages(engine: Engine) -> Iterator[str]:
    """What SQLite finds wrong with its own file."""
    try:
        with reading(engine) as connection:
            for (text,) in connection.exec_driver_sql("PRAGMA integrity_check(20)"):
                if text != "ok":
                    yield f"the file is damaged: {' '.join(text.split())}"
    except DatabaseError as error:
        yield f"the file is damaged: {why(error)}"


def _rows(engine: Engine, table: Table) -> Iterator[Any]:
    """All rows of a table, in pages of its key: no transaction is held while they are examined."""
    key = list(table.primary_key.columns)
    query: Select[Any] = select(table)
    if table is schema.chunk:
        layout = schema.layout
        query = select(table, func.length(layout.c.metrics).label("metrics_bytes")).outerjoin(
            layout, (layout.c.run == table.c.run) & (layout.c.id == table.c.layout)
        )
    elif table is schema.fingerprint:
        told = schema.print_content
        query = select(table, func.length(told.c.digests).label("digests_bytes")).outerjoin(
            told,
            (told.c.run == table.c.run)
            & (told.c.step == table.c.step)
            & (told.c.content == table.c.content),
        )
    # By the run first: rows of one run are a stretch of the key.
    with reading(engine) as connection:
        runs = connection.scalars(select(table.c.run).distinct()).all()
    for run in sorted(runs):
        with engine.connect() as connection:
            found = connection.execution_options(yield_per=_AT_ONCE).execute(
                query.where(table.c.run == run).order_by(*key)
            )
            yield from found


def _place(table: Table, row: Any) -> str:
    parts = [
        f"{c.name} {getattr(row, c.name)}"
        for c in table.primary_key.columns
        if c.name not in ("run", "content")
    ]
    return ", ".join(parts)


def _expect(name: str, data: bytes | None, size: int) -> None:
    have = 0 if data is None else len(data)
    if have != size:
        raise ValueError(f"its {name} are {have} bytes, and should be {size}")


def _steps(row: Any) -> None:
    if row.points < 1:
        raise ValueError(f"it has {row.points} points")
    if row.steps is not None and len(row.steps) not in (8, 8 * row.points):
        raise ValueError(f"its steps are {len(row.steps)} bytes, and should be {8 * row.points}")
    steps = unpack_steps(row.steps, row.first_step, row.points)
    if steps[0] != row.first_step or steps[-1] != row.last_step or (np.diff(steps) < 1).any():
        raise ValueError(
            f"its steps are {steps[0]} to {steps[-1]}, and should ascend from {row.first_step} to "
            f"{row.last_step}"
        )


def _chunk(row: Any) -> int:
    if row.metrics_bytes is None:
        raise ValueError("nothing says which series it holds")
    _steps(row)
    series = row.metrics_bytes // 4
    _expect("values", row.values, 8 * series * row.points)
    return int(series * row.points)


def _merged_chunk(row: Any) -> int:
    arrivals, counts = unpack_parts(row.parts, row.arrival)
    if not len(counts) or (counts < 1).any() or arrivals[-1] != row.last_arrival:
        raise ValueError("what it says of when its steps came contradicts itself")
    return 0


def _rollup(row: Any) -> int:
    if row.offsets is not None:
        _expect("offsets", row.offsets, row.buckets)
    if row.counts is not None:
        _expect("counts", row.counts, 4 * row.buckets)
    if row.buckets < 1 or len(row.values) not in (12 * row.buckets, 24 * row.buckets):
        raise ValueError(f"its values are {len(row.values)} bytes, for {row.buckets} buckets")
    return 0


def _layers(row: Any) -> int:
    _steps(row)
    _expect("values", row.values, 8 * row.tensors * row.points)
    return int(row.tensors * row.points)


def _fingerprint(row: Any) -> int:
    if row.digests_bytes is None:
        raise ValueError("what it says is not there")
    if row.digests_bytes != 8 * row.tensors:
        raise ValueError(f"it has {row.digests_bytes // 8} digests, for {row.tensors} tensors")
    return 0


def _print_content(row: Any) -> int:
    digests = unpack(row.digests, np.uint64)
    sketches = None if row.sketches is None else unpack(row.sketches, np.float64)
    made = wire.Fingerprint(step=row.step, stage="", table="", digests=digests, sketches=sketches)
    if content_of(made).key != bytes(row.content):
        raise ValueError("it says something else than was stored")
    return len(digests) + (0 if sketches is None else len(sketches))


_FITS: dict[Table, Callable[[Any], int]] = {
    schema.chunk: _chunk,
    schema.merged_chunk: _merged_chunk,
    schema.rollup: _rollup,
    schema.layers: _layers,
    schema.fingerprint: _fingerprint,
    schema.print_content: _print_content,
}
