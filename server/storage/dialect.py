"""The one statement that SQLAlchemy spells differently for each database."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite


def insert(connection: Connection, table: Table) -> Any:
    """An INSERT that knows ON CONFLICT."""
    return (sqlite if connection.dialect.name == "sqlite" else postgresql).insert(table)
