"""Who is notified of alerts, and what came of it."""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Column, Float, Index, Integer, String, Table, Text

from rankscope.server.storage.schema.base import metadata

# Who is told of alerts; see `notifications.py`.
notification_target = Table(
    "notification_target",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("name", String(250), nullable=False),
    # With whatever password is in it.
    Column("url", Text, nullable=False),
    # NULL: all.
    Column("projects", JSON(none_as_null=True), nullable=True),
    Column("kinds", JSON(none_as_null=True), nullable=True),
    Column("severity", String(16), nullable=False),
    Column("created_at", Float, nullable=False),
)

# What each of them has been told of an alert, and when it is to be told more.
notification = Table(
    "notification",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("alert", String(32), primary_key=True),
    Column("target", String(16), primary_key=True),
    # Severity that was told last, or `resolved`; empty: nothing yet.
    Column("told", String(16), nullable=False),
    Column("told_at", Float, nullable=True),
    # NULL: nothing is to be told.
    Column("due_at", Float, nullable=True),
    # Since when, and how often it was tried in vain, and what was said to the last try.
    Column("wanted_at", Float, nullable=True),
    Column("failures", Integer, nullable=False, server_default="0"),
    Column("error", Text, nullable=False, server_default=""),
)
# The notifier asks every few seconds: a few of many.
Index(
    "ix_notification_due",
    notification.c.due_at,
    sqlite_where=notification.c.due_at.is_not(None),
    postgresql_where=notification.c.due_at.is_not(None),
)
