"""What each database is set to when a connection opens."""

import subprocess
import sys

import pytest

from rankscope.server.storage.database.engine import open_engine, reading, writing


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


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_processes_write_in_turns(database_url):
    engine = open_engine(database_url)
    with writing(engine) as connection:
        connection.exec_driver_sql("CREATE TABLE line (writer TEXT, n INTEGER)")
    # Longer in all than SQLite itself would wait, were one of them never let in.
    code = """
import sys, time
from rankscope.server.storage.database.engine import open_engine, writing
engine = open_engine(sys.argv[1])
for n in range(100):
    with writing(engine) as connection:
        connection.exec_driver_sql("INSERT INTO line VALUES (?, ?)", (sys.argv[2], n))
        time.sleep(0.01)
"""
    command = [sys.executable, "-c", code, database_url]
    writers = [subprocess.Popen([*command, name]) for name in "ab"]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    with reading(engine) as connection:
        rows = connection.exec_driver_sql("SELECT writer FROM line ORDER BY rowid").fetchall()
    assert len(rows) == 200
    # Neither had to wait until the other was done.
    assert len({row[0] for row in rows[:150]}) == 2
    engine.dispose()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_writer_that_is_killed_leaves_the_turn_to_others(database_url):
    code = """
import sys, time
from rankscope.server.storage.database.engine import open_engine, writing
with writing(open_engine(sys.argv[1])):
    print("writes", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, database_url], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout.readline() == b"writes\n"
        writer.kill()
    engine = open_engine(database_url)
    with writing(engine) as connection:
        connection.exec_driver_sql("CREATE TABLE line (writer TEXT)")
    engine.dispose()
