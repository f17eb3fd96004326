"""What each database is told when a connection opens."""

import pytest

from rankscope.server.storage.engine import open_engine, reading, writing


def said(connection, question):
    return connection.exec_driver_sql(question).scalar()


def test_what_was_answered_outlives_a_power_cut(database_url):
    engine = open_engine(database_url)
    with writing(engine) as connection:
        if engine.dialect.name == "sqlite":
            assert said(connection, "PRAGMA synchronous") == 2
            assert said(connection, "PRAGMA journal_mode") == "wal"
        else:
            assert said(connection, "SHOW synchronous_commit") == "on"
    engine.dispose()


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_suspended_server_holds_no_rows_for_ever(database_url):
    engine = open_engine(database_url)
    with reading(engine) as connection:
        assert said(connection, "SHOW idle_in_transaction_session_timeout") == "1min"
    engine.dispose()
