"""What detectors found, what people say about it, and by what they judge."""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Boolean, Column, Float, Index, Integer, String, Table, Text

from rankscope.server.storage.schema.base import metadata

alert = Table(
    "alert",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("id", String(32), primary_key=True),
    Column("kind", String(64), nullable=False),
    Column("key", String(250), nullable=False),
    Column("severity", String(16), nullable=False),
    Column("state", String(16), nullable=False),
    Column("title", Text, nullable=False),
    Column("first_step", BigInteger, nullable=False),
    Column("seen_step", BigInteger, nullable=False),
    Column("last_step", BigInteger, nullable=False),
    Column("opened_at", Float, nullable=False),
    Column("resolved_at", Float, nullable=True),
    # Whether somebody has, and until when that holds; NULL: for ever. Written by routes alone.
    Column("acknowledged", Boolean, nullable=False),
    Column("acknowledged_by", Text, nullable=False, server_default=""),
    Column("acknowledged_why", Text, nullable=False, server_default=""),
    Column("acknowledged_at", Float, nullable=True),
    Column("acknowledged_until", Float, nullable=True),
    Column("ranks", JSON, nullable=False),
    Column("tensors", JSON, nullable=False),
    Column("stage", String(32), nullable=True),
    Column("clear_after", BigInteger, nullable=True),
    Column("cause", Text, nullable=False),
    Column("remedy", Text, nullable=False),
    Column("evidence", JSON, nullable=False),
    Column("parent", String(32), nullable=True),
    Column("consequences", JSON, nullable=False),
    # Number of the start of the job in which it was found.
    Column("start", Integer, nullable=False, server_default="0"),
    # Newest first, over all runs.
    Index(None, "opened_at"),
    # An alert by its id alone.
    Index(None, "id"),
)

# What happened to an alert, and why.
alert_event = Table(
    "alert_event",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("alert", String(32), primary_key=True),
    Column("n", Integer, primary_key=True, autoincrement=False),
    Column("step", BigInteger, nullable=False),
    Column("at", Float, nullable=False),
    Column("what", String(32), nullable=False),
    Column("reason", Text, nullable=False),
)

# Each detector's answer for the run as it stands.
check = Table(
    "finding_check",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", String(64), primary_key=True),
    Column("status", String(24), nullable=False),
    Column("why", Text, nullable=False),
)

silence = Table(
    "silence",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("id", String(32), primary_key=True),
    Column("kind", String(64), nullable=False),
    Column("created_at", Float, nullable=False),
    # NULL: for ever.
    Column("until", Float, nullable=True),
    # Why, and who says so.
    Column("comment", Text, nullable=False),
    Column("name", Text, nullable=False, server_default=""),
)

# What each run is judged by: all settings of the detectors as they were at the first check of it.
judged_by = Table(
    "judged_by",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("settings", JSON, nullable=False),
)

# What somebody set for the detectors of a project's runs to come.
project_settings = Table(
    "project_settings",
    metadata,
    Column("project", String(250), primary_key=True),
    Column("settings", JSON, nullable=False),
    Column("changed_at", Float, nullable=False),
)
