"""Fingerprints of the ranks, and how they compare."""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Boolean, Column, Index, Integer, LargeBinary, String, Table

from rankscope.server.storage.schema.base import metadata

# Whose fingerprint came when, of what. What it says is in `print_content`.
fingerprint = Table(
    "fingerprint",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("stage", String(32), primary_key=True),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("rank", Integer, primary_key=True, autoincrement=False),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    # The state of an optimizer is more than one table.
    Column("table", String(64), primary_key=True),
    Column("arrival", BigInteger, nullable=False),
    # Number of tensors, T, and of columns of a sketch, K; 0 where there are no sketches.
    Column("tensors", Integer, nullable=False),
    Column("buckets", Integer, nullable=False),
    Column("content", LargeBinary, nullable=False),
    # As for chunks.
    Index(None, "run", "arrival"),
)

# What fingerprints of a step say, each once: the replicas of a healthy job all say the same.
print_content = Table(
    "print_content",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    # See `fingerprints.content_of`.
    Column("content", LargeBinary, primary_key=True),
    # uint64 [T], float64 [T, K].
    Column("digests", LargeBinary, nullable=False),
    Column("sketches", LargeBinary, nullable=True),
)

# Comparisons of the ranks, run-length encoded: a row holds from `step` until `until_step`.
comparison = Table(
    "comparison",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("stage", String(32), primary_key=True),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("until_step", BigInteger, nullable=False),
    # Number of compared steps in it.
    Column("checked", Integer, nullable=False),
    Column("equal", Boolean, nullable=False),
    Column("decided", Boolean, nullable=False),
    Column("ranks", LargeBinary, nullable=False),
    Column("clusters", LargeBinary, nullable=False),
    Column("distance", LargeBinary, nullable=False),
    Column("relative", LargeBinary, nullable=False),
    Column("tensors", JSON, nullable=False),
    Column("tensor_count", Integer, nullable=False),
    Column("missing", JSON, nullable=False),
    # Pages of the divergence of all stages in the order of steps.
    Index(None, "run", "step"),
)
