"""What SQLAlchemy spells differently for each database."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import ColumnElement, Connection, Float, Table, Text, cast, exists, func, select
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


def any_element(
    connection: Connection,
    column: ColumnElement[Any],
    fits: Callable[[ColumnElement[str]], ColumnElement[bool]],
) -> ColumnElement[bool]:
    """Whether an element of a JSON list fits; numbers are asked for as text."""
    if connection.dialect.name == "sqlite":
        elements = func.json_each(column)
    else:
        elements = func.json_array_elements_text(column)
    value = elements.table_valued("value").c.value
    return exists(select(value).where(fits(cast(value, Text))))
