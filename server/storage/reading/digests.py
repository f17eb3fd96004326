"""Digests of one rank or many over a range of steps: what two runs are compared by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from sqlalchemy import Connection, func, select

from rankscope.agent import wire
from rankscope.agent.wire import STAGES
from rankscope.server.storage import schema
from rankscope.server.storage.database.packing import unpack_steps
from rankscope.server.storage.ingest.dictionary import read_layouts
from rankscope.server.storage.ingest.fingerprints import fingerprint_of, load_contents
from rankscope.server.storage.ingest.newest_attempts import newest_attempts
from rankscope.server.storage.ingest.tables import load_tables
from rankscope.server.storage.reading import series
from rankscope.server.window import Digests, FingerprintKey


def read_digests(connection: Connection, *, run: int, first: int, last: int) -> Digests:
    """Model digests from step `first` to `last`, both included, of each link and rank."""
    m = schema.metric.c
    names = connection.scalars(select(m.name).where(m.run == run, m.kind == "word"))
    found: Digests = {}
    for stage in sorted(set(names) & set(STAGES)):
        for one in series.read_series(
            connection,
            run=run,
            metric=stage,
            from_step=first,
            to_step=last,
            max_points=last - first + 2,
            kind="word",
        ):
            # Stored as they came: eight bytes that are no float.
            found[stage, one.rank] = (one.steps, one.values.view(np.uint64))
    return found


def next_step(connection: Connection, *, run: int, after: int) -> int | None:
    """The first step from `after` on at which any rank has a digest or a fingerprint, if any."""
    m, c, f = schema.metric.c, schema.chunk.c, schema.fingerprint.c
    wanted = select(m.id).where(m.run == run, m.kind == "word", m.name.in_(STAGES))
    numbers = set(connection.scalars(wanted))
    layouts = [n for n, of in read_layouts(connection, run=run).items() if numbers & set(of)]
    there = (c.run == run, c.layout.in_(layouts))
    reach = select(c.first_step, c.points, c.steps).where(
        *there, c.first_step < after, c.last_step >= after
    )
    found = [
        connection.scalar(select(func.min(c.first_step)).where(*there, c.first_step >= after)),
        connection.scalar(
            select(func.min(f.step)).where(f.run == run, f.stage.in_(STAGES), f.step >= after)
        ),
    ]
    for row in connection.execute(reach):
        steps = unpack_steps(row.steps, row.first_step, row.points)
        found.append(int(steps[steps >= after].min()))
    return min((step for step in found if step is not None), default=None)


def fingerprint_rows(
    connection: Connection, *, run: int, first: int, last: int
) -> dict[FingerprintKey, dict[str, Any]]:
    """Rows of `fingerprint` from step `first` to `last`, by table; of the newest attempt each."""
    f = schema.fingerprint.c
    rows = connection.execute(
        select(f.stage, f.step, f.rank, f.attempt, f.table, f.tensors, f.buckets, f.content)
        .where(f.run == run, f.stage.in_(STAGES), f.step >= first, f.step <= last)
        .order_by(f.attempt)
    )
    found: dict[FingerprintKey, dict[str, Any]] = {}
    newest: dict[FingerprintKey, int] = {}
    for row in rows:
        key = FingerprintKey(row.step, row.stage, row.rank)
        if newest.setdefault(key, row.attempt) != row.attempt:
            found[key] = {}
            newest[key] = row.attempt
        found.setdefault(key, {})[row.table] = row
    return found


def load_fingerprints(
    connection: Connection, *, run: int, rows: Mapping[str, Any]
) -> dict[str, wire.Fingerprint]:
    """What the fingerprints of some rows say, by table."""
    contents = load_contents(connection, run=run, rows=rows.values())
    return {name: fingerprint_of(row, contents) for name, row in rows.items()}


def rank_tables(connection: Connection, *, run: int) -> dict[int, dict[str, wire.TensorTable]]:
    """The tensor tables that each rank's newest attempt has, by rank and name."""
    rows = newest_attempts(connection, run=run)
    versions = {row.rank: dict(row.tables) for row in rows}
    every = {version for held in versions.values() for version in held.values()}
    tables = load_tables(connection, run=run, versions=every)
    return {
        rank: {name: tables[version] for name, version in held.items() if version in tables}
        for rank, held in versions.items()
    }
