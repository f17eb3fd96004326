"""What servers of one database share: who lives, who evaluates what, and how far that is."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Float, LargeBinary, String, Table

from rankscope.server.storage.schema.base import metadata

# Servers that evaluate, each with the time up to which it is taken to live.
server = Table(
    "server",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("until", Float, nullable=False),
)

# Which of them evaluates a run. `number` rises with every change of hands: who writes by an older
# one has lost it.
lease = Table(
    "lease",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    # Empty: nobody.
    Column("server", String(64), nullable=False),
    Column("number", BigInteger, nullable=False),
)

# What the evaluation of a run had come to after everything up to `arrival`; see `snapshot.py`.
snapshot = Table(
    "snapshot",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    # Of the code that made it.
    Column("version", String(32), nullable=False),
    Column("arrival", BigInteger, nullable=False),
    Column("state", LargeBinary, nullable=False),
)
