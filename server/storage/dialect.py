"""What SQLAlchemy spells differently for each database."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Float, Table, cast, func
from sqlalchemy.dialects import postgresql, sqlite


def insert(connection: Connection, table: Table) -> Any:
    """An INSERT that knows ON CONFLICT."""
    return (sqlite if connection.dialect.name == "sqlite" else postgresql).insert(table)


def clock(connection: Connection) -> Any:
    """The database's own time, seconds since 1970: one clock for all servers."""
    if connection.dialect.name == "sqlite":
        return (func.julianday("now") - 2440587.5) * 86400.0
    # Of the statement: Citus takes no function in an update whose value changes within it.
    return cast(func.extract("epoch", func.statement_timestamp()), Float)
