"""Who may ask the server what."""

from __future__ import annotations

from sqlalchemy import JSON, Column, Float, String, Table

from rankscope.server.storage.schema.base import metadata

# Who may do what; see `tokens.py`.
access_token = Table(
    "access_token",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("name", String(250), nullable=False),
    # SHA-256 of the secret, as hexadecimal digits.
    Column("digest", String(64), nullable=False, unique=True),
    Column("scopes", JSON, nullable=False),
    # NULL: all.
    Column("projects", JSON(none_as_null=True), nullable=True),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=True),
    Column("revoked_at", Float, nullable=True),
)
