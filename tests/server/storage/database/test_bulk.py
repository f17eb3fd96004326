"""Rows on the fast path: what each database takes them for, and what it does with those it has."""

import pytest
from sqlalchemy import Column, Float, Integer, MetaData, Table, select

from rankscope.server.storage import schema
from rankscope.server.storage.database.bulk import add_missing_rows, add_rows
from rankscope.server.storage.database.engine import reading, writing

# run, layout, rank, first_step, arrival, last_step, attempt, points, steps, values
ROWS = [
    (2**40, 0, 7, 2**62, 1, 2**62, 0, 1, None, b"\x00\xff" * 4),
    (2**40, 0, 7, 0, 2, 5, 3, 2, b"", b""),
]


def stored(engine):
    c = schema.chunk
    with reading(engine) as connection:
        rows = connection.execute(select(*c.c).order_by(c.c.arrival))
        return [tuple(row) for row in rows]


def test_rows_come_back_as_they_were(engine):
    with writing(engine) as connection:
        add_rows(connection, schema.chunk, ROWS)
        add_rows(connection, schema.chunk, [])
    assert stored(engine) == ROWS


def test_rows_that_are_there_stay(engine):
    with writing(engine) as connection:
        add_missing_rows(connection, schema.chunk, ROWS[:1])
        add_missing_rows(connection, schema.chunk, [(*ROWS[0][:9], b"other"), ROWS[1]])
    assert stored(engine) == ROWS


def test_a_row_that_is_there_fails_where_none_may_be(engine):
    with pytest.raises(Exception, match="(?i)unique"), writing(engine) as connection:
        add_rows(connection, schema.chunk, [ROWS[0], ROWS[0]])
    assert stored(engine) == []


def test_a_column_that_has_no_binary_form_here_is_reported(engine):
    if engine.dialect.name != "postgresql":
        pytest.skip("SQLite takes any value")
    odd = Table("odd", MetaData(), Column("a", Integer), Column("b", Float))

    def add():
        with writing(engine) as connection:
            odd.create(connection)
            add_rows(connection, odd, [(1, 2.0)])

    with pytest.raises(TypeError, match="integers, bytes and text"):
        add()
