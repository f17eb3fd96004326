"""Engines: what each database is set to when a connection opens."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary, finalize

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

# SQLite has one writer at a time. Waiting for it here is fair and never times out; waiting inside
# SQLite is neither, and ends in "database is locked".
_writers: WeakKeyDictionary[Engine, _Turn] = WeakKeyDictionary()
_LONGEST_PAUSE_S = 60


class _Turn:
    """To write: one thread of one process at a time.

    Processes wait for each other at a file beside the database. It must be another one: closing a
    file takes back all locks that SQLite has on it in the same process.
    """

    def __init__(self, database: str | None) -> None:
        self._thread = threading.Lock()
        in_memory = not database or ":memory:" in database or database.startswith("file:")
        self._path = None if in_memory else f"{database}-lock"
        self._file = -1

    def __enter__(self) -> None:
        self._thread.acquire()
        try:
            if self._path is not None:
                self._wait(self._path)
        except BaseException:
            self._thread.release()
            raise

    def __exit__(self, *exception: object) -> None:
        if self._file >= 0:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._thread.release()

    def _wait(self, path: str) -> None:
        if self._file < 0:
            try:
                self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError:
                return  # SQLite says better what is wrong with the place
            finalize(self, os.close, self._file)
        fcntl.flock(self._file, fcntl.LOCK_EX)


def open_engine(url: str) -> Engine:
    """An engine for an SQLAlchemy URL; `postgresql://` means psycopg 3."""
    parsed = make_url(url)
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() != "sqlite":
        engine = create_engine(parsed, pool_size=10, max_overflow=20, pool_pre_ping=True)
        if parsed.get_backend_name() == "postgresql":
            event.listen(engine, "connect", _prepare_postgresql)
        return engine
    engine = create_engine(parsed, connect_args={"timeout": 30}, pool_size=20, max_overflow=20)
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    _writers[engine] = _Turn(parsed.database)
    return engine


def why(error: Exception) -> str:
    """What a database says is wrong, in one line."""
    lines = str(getattr(error, "orig", None) or error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def is_unable(error: Exception) -> bool:
    """Whether a database could not do what it was asked for, and may later: away, full, busy.

    What it does not understand is another matter: SQLite says so with the same class of error.
    """
    if not isinstance(error, OperationalError | InterfaceError | PoolTimeout):
        return False
    code = getattr(getattr(error, "orig", None), "sqlite_errorcode", None)
    return code != sqlite3.SQLITE_ERROR


def touch(engine: Engine) -> None:
    """Writes something that changes nothing, to find out whether the database takes it.

    Raises:
        SQLAlchemyError: it does not.
    """
    with writing(engine) as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = version_num"))


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """A transaction that reads: all its queries see the database at one moment.

    It must not outlive the call: it holds up what each of the databases has to clean up.
    """
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            # Else each query sees what was committed meanwhile: ranks without their points.
            connection.execution_options(
                isolation_level="REPEATABLE READ", postgresql_readonly=True
            )
        with connection.begin():
            yield connection


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """A transaction that writes; committed at the end of the block, rolled back by an exception."""
    with _writers.get(engine) or nullcontext(), engine.connect() as connection:
        connection.execution_options(rankscope_writes=True)
        with connection.begin():
            yield connection


def _prepare_postgresql(connection: Any, record: Any) -> None:
    # A server that is suspended in the middle of a transaction holds rows of its runs: batches for
    # them, and whoever takes the runs over, would wait until it wakes.
    with connection.cursor() as cursor:
        cursor.execute(f"SET idle_in_transaction_session_timeout = '{_LONGEST_PAUSE_S}s'")
    connection.commit()


def _prepare_sqlite(connection: Any, record: Any) -> None:
    # pysqlite's own transaction control begins too late for a read that is followed by a write.
    connection.isolation_level = None
    cursor = connection.cursor()
    # Readers and the writer do not wait for each other.
    cursor.execute("PRAGMA journal_mode = WAL")
    # What was answered must be there after a power cut as well.
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.execute("PRAGMA temp_store = MEMORY")
    # KiB; each connection has its own.
    cursor.execute("PRAGMA cache_size = -16384")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get("rankscope_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
