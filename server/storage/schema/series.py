"""Series: points as they came, and roll-ups of them."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    UniqueConstraint,
)

from rankscope.server.storage.schema.base import metadata

# What tensors a rank holds; the same for most ranks.
tensor_table = Table(
    "tensor_table",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("version", String(32), primary_key=True),
    Column("tensors", JSON, nullable=False),
)

# Numbers of batches that were stored apart from the newest unbroken range: where a batch has been
# given up, came late or was cut to pieces.
taken = Table(
    "taken",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("rank", Integer, primary_key=True, autoincrement=False),
    Column("session", String(64), primary_key=True),
    Column("first_seq", BigInteger, primary_key=True, autoincrement=False),
    Column("end_seq", BigInteger, nullable=False),
)

metric = Table(
    "metric",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("id", Integer, primary_key=True, autoincrement=False),
    # `scalar`, `word` for the digests of a stage, `layers` for one number a tensor of a table.
    Column("kind", String(8), nullable=False),
    Column("name", String(250), nullable=False),
    # Of layers: name of the table and its version; empty where the rank had not reported that yet.
    Column("table", String(64), nullable=False, server_default=""),
    Column("version", String(32), nullable=False, server_default=""),
    UniqueConstraint("run", "kind", "name", "table", "version"),
)

# Series that came together in one batch, with values at the same steps.
layout = Table(
    "layout",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("id", Integer, primary_key=True, autoincrement=False),
    # Their numbers in the run's dictionary, ascending: int32.
    Column("metrics", LargeBinary, nullable=False),
)

# All of them in one row: with a row for each series, keys and indexes would cost more than the
# values do where batches are short, and a page of each series' index would change with each batch.
chunk = Table(
    "chunk",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("layout", Integer, primary_key=True, autoincrement=False),
    Column("rank", Integer, primary_key=True, autoincrement=False),
    Column("first_step", BigInteger, primary_key=True, autoincrement=False),
    Column("arrival", BigInteger, primary_key=True, autoincrement=False),
    Column("last_step", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    # Number of steps, S.
    Column("points", Integer, nullable=False),
    # See `packing.pack_steps`; NULL where the steps are first_step, first_step + 1, ...
    Column("steps", LargeBinary, nullable=True),
    # float64, or uint64 for digests, [M, S]: each series of the layout in its order.
    Column("values", LargeBinary, nullable=False),
    # The evaluator reads what has come since it last read.
    Index(None, "run", "arrival"),
)

# Rows of `chunk` that were several, and which of their steps came when; see `merging.py`.
merged_chunk = Table(
    "merged_chunk",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("layout", Integer, primary_key=True, autoincrement=False),
    Column("rank", Integer, primary_key=True, autoincrement=False),
    Column("first_step", BigInteger, primary_key=True, autoincrement=False),
    # That of the first part, as it stands in `chunk`.
    Column("arrival", BigInteger, primary_key=True, autoincrement=False),
    Column("last_arrival", BigInteger, nullable=False),
    # See `packing.pack_parts`.
    Column("parts", LargeBinary, nullable=False),
    # The evaluator asks which of them reach beyond what it has seen: mostly none.
    Index(None, "run", "last_arrival"),
)

# Count, mean, smallest and largest value of stretches of steps; see `rollups.py`.
rollup = Table(
    "rollup",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("metric", Integer, primary_key=True, autoincrement=False),
    Column("level", Integer, primary_key=True, autoincrement=False),
    Column("rank", Integer, primary_key=True, autoincrement=False),
    Column("block", BigInteger, primary_key=True, autoincrement=False),
    # Place of its first bucket, and how many there are.
    Column("first", Integer, nullable=False),
    Column("buckets", Integer, nullable=False),
    # uint8, places of the buckets; NULL where none is left out.
    Column("offsets", LargeBinary, nullable=True),
    # int32; NULL where each step has a point.
    Column("counts", LargeBinary, nullable=True),
    # float32 or float64 [3, buckets]: means, smallest, largest.
    Column("values", LargeBinary, nullable=False),
)

# How far a run's roll-ups go; see `watermarks.py`.
rollup_mark = Table(
    "rollup_mark",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    # Rises with every change: who writes by an older one has been overtaken.
    Column("number", BigInteger, nullable=False),
    Column("arrival", BigInteger, nullable=False),
    # Something that came up to `arrival` still has to be rolled up.
    Column("pending", Boolean, nullable=False),
    # int64 [R, 5] and [256].
    Column("ranks", LargeBinary, nullable=False),
    Column("touched", LargeBinary, nullable=False),
    Column("touched_width", BigInteger, nullable=False),
    # int64 [R, 2 + tiers]: rank, its last short row of `chunk`, up to where they are merged.
    Column("merges", LargeBinary, nullable=True),
)

# One number for each tensor of a table at some steps.
layers = Table(
    "layers",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("metric", Integer, primary_key=True, autoincrement=False),
    Column("rank", Integer, primary_key=True, autoincrement=False),
    Column("first_step", BigInteger, primary_key=True, autoincrement=False),
    Column("arrival", BigInteger, primary_key=True, autoincrement=False),
    Column("last_step", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    # Number of steps, S, and of tensors, T.
    Column("points", Integer, nullable=False),
    Column("tensors", Integer, nullable=False),
    # As for chunks.
    Column("steps", LargeBinary, nullable=True),
    # float64 [T, S]: the steps of one tensor stand together, so that a series of it reads these
    # alone.
    Column("values", LargeBinary, nullable=False),
)
