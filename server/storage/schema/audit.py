"""Who did what that others have to answer for."""

from __future__ import annotations

from sqlalchemy import JSON, Column, Float, Index, String, Table, Text

from rankscope.server.storage.schema.base import metadata

# One administrative act; see `access/audit.py`. Rows are added and never changed.
audit = Table(
    "audit",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("at", Float, nullable=False),
    Column("act", String(64), nullable=False),
    # Name and id of the token; of a command the name of the operating system's user. The id is
    # empty where no token was asked for.
    Column("name", String(250), nullable=False),
    Column("token", String(16), nullable=False),
    # Address of the client, or name of the host of a command.
    Column("origin", String(250), nullable=False),
    # What it was done to, by the id that people know. Not `run`: with a run that is deleted would
    # go who deleted it.
    Column("subject", Text, nullable=False),
    Column("details", JSON, nullable=False),
    # Newest first.
    Index(None, "at", "id"),
)
