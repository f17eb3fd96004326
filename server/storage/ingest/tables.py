"""Tensor tables: stored once a run, however many ranks say the same, and never changed.

A rank's row names the versions that hold for it now. Numbers for each tensor name the version that
held when they came, so that they keep their meaning when a rank's table is replaced.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from hashlib import blake2b

from sqlalchemy import Connection, insert, select

from rankscope.agent import wire
from rankscope.server.storage import schema


def store_tables(
    connection: Connection, *, run: int, tables: Mapping[str, wire.TensorTable]
) -> dict[str, str]:
    """Stores those that are not there yet; the version of each, by name.

    The caller holds the run's row.
    """
    plain = {name: wire.table_to_json(table) for name, table in tables.items()}
    versions = {name: _version(content) for name, content in plain.items()}
    t = schema.tensor_table
    known = set(
        connection.scalars(
            select(t.c.version).where(t.c.run == run, t.c.version.in_(set(versions.values())))
        )
        if versions
        else ()
    )
    new = {versions[name]: plain[name] for name in plain if versions[name] not in known}
    if new:
        connection.execute(
            insert(t),
            [{"run": run, "version": version, "tensors": new[version]} for version in new],
        )
    return versions


def load_tables(
    connection: Connection, *, run: int, versions: Collection[str]
) -> dict[str, wire.TensorTable]:
    """Tables by version."""
    t = schema.tensor_table
    if not versions:
        return {}
    rows = connection.execute(
        select(t.c.version, t.c.tensors).where(t.c.run == run, t.c.version.in_(set(versions)))
    )
    return {
        row.version: wire.TensorTable(
            names=tuple(row.tensors["names"]),
            shapes=tuple(tuple(shape) for shape in row.tensors["shapes"]),
            dtypes=tuple(row.tensors["dtypes"]),
            shards=tuple(row.tensors["shards"]),
        )
        for row in rows
    }


def _version(content: Mapping[str, object]) -> str:
    text = json.dumps(content, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=16).hexdigest()
