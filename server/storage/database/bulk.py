"""Many rows of a table at once, on the fast path of each database.

SQLAlchemy looks at each value of each row on its way to the driver, which costs as much as the
driver and the database together. What is given here is what the driver takes as it is: integers,
bytes and None.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import BigInteger, Column, Connection, Integer, LargeBinary, String, Table
from sqlalchemy.engine import Dialect

Row = tuple[Any, ...]


def add_rows(connection: Connection, table: Table, rows: Sequence[Row]) -> None:
    """Adds rows that are not there yet, with a value for every column, in the table's order."""
    if not rows:
        return
    if connection.dialect.name == "postgresql":
        _copy(connection, table, rows)
    else:
        connection.exec_driver_sql(_insert(connection.dialect, table), [*rows])


def add_missing_rows(connection: Connection, table: Table, rows: Sequence[Row]) -> None:
    """The same, of rows that may be there: those stay as they are."""
    if rows:
        statement = f"{_insert(connection.dialect, table)} ON CONFLICT DO NOTHING"
        connection.exec_driver_sql(statement, [*rows])


@lru_cache(maxsize=64)
def _insert(dialect: Dialect, table: Table) -> str:
    mark = "%s" if dialect.name == "postgresql" else "?"
    return f"INSERT INTO {_into(dialect, table)} VALUES ({', '.join([mark] * len(table.c))})"


def _into(dialect: Dialect, table: Table) -> str:
    names = dialect.identifier_preparer
    columns = ", ".join(names.format_column(column) for column in table.c)
    return f"{names.format_table(table)} ({columns})"


def _copy(connection: Connection, table: Table, rows: Sequence[Row]) -> None:
    into = _into(connection.dialect, table)
    driver: Any = connection.connection.driver_connection
    with (
        driver.cursor() as cursor,
        cursor.copy(f"COPY {into} FROM STDIN (FORMAT BINARY)") as copy,
    ):
        copy.set_types([_type_of(column) for column in table.c])
        for row in rows:
            copy.write_row(row)


def _type_of(column: Column[Any]) -> str:
    """PostgreSQL's name of a column's type: the binary form has no room for a guess."""
    if isinstance(column.type, BigInteger):
        return "int8"
    if isinstance(column.type, Integer):
        return "int4"
    if isinstance(column.type, LargeBinary):
        return "bytea"
    if isinstance(column.type, String):
        return "text"
    raise TypeError(f"{column}: rows are of integers, bytes and text")
