"""Fingerprints: whose came when, and what they say, which is stored once for all who say the same.

The replicas of a healthy job have equal bits, and so equal digests and sketches, which are some
hundred times as many bytes as the row that says whose they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import Connection, select

from rankscope.agent import wire
from rankscope.server.storage import schema
from rankscope.server.storage.database.packing import pack, unpack

# Keys of one query: SQLite's limit on variables is far above.
_AT_ONCE = 500


class Content(NamedTuple):
    """What a fingerprint says, as bytes; `key` stands for it."""

    key: bytes
    digests: bytes
    sketches: bytes | None


def content_of(made: wire.Fingerprint) -> Content:
    """What a fingerprint says; equal keys mean equal bytes (BLAKE2b, 128 bits)."""
    digests = pack(made.digests)
    sketches = None if made.sketches is None else pack(made.sketches)
    # The number of digests first: what follows them is distinguished from them by it.
    hashed = blake2b(len(digests).to_bytes(8, "little"), digest_size=16)
    hashed.update(digests)
    if sketches is not None:
        hashed.update(sketches)
    return Content(hashed.digest(), digests, sketches)


def bytes_of(row: Any) -> int:
    """Size of what the fingerprint of a row of `fingerprint` says."""
    return 8 * int(row.tensors) * (1 + int(row.buckets))


def load_contents(
    connection: Connection, *, run: int, rows: Iterable[Any]
) -> dict[tuple[int, bytes], tuple[wire.UInt64, wire.Float64 | None]]:
    """Digests, and sketches as flat arrays, of rows of `fingerprint`, by step and content."""
    wanted: dict[int, set[bytes]] = defaultdict(set)
    for row in rows:
        wanted[row.step].add(bytes(row.content))
    t = schema.print_content
    found = {}
    for step, contents in wanted.items():
        keys = sorted(contents)
        for n in range(0, len(keys), _AT_ONCE):
            for row in connection.execute(
                select(t.c.content, t.c.digests, t.c.sketches).where(
                    t.c.run == run, t.c.step == step, t.c.content.in_(keys[n : n + _AT_ONCE])
                )
            ):
                sketches = None if row.sketches is None else unpack(row.sketches, np.float64)
                found[step, bytes(row.content)] = (unpack(row.digests, np.uint64), sketches)
    return found


def fingerprint_of(
    row: Any, contents: Mapping[tuple[int, bytes], tuple[wire.UInt64, wire.Float64 | None]]
) -> wire.Fingerprint:
    """The fingerprint of a row of `fingerprint`; those that say the same share their arrays."""
    digests, sketches = contents[row.step, bytes(row.content)]
    if sketches is not None:
        sketches = sketches.reshape(len(digests), row.buckets)
    return wire.Fingerprint(
        step=row.step, stage=row.stage, table=row.table, digests=digests, sketches=sketches
    )
