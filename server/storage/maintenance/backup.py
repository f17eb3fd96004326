"""Copies of a whole database, made while servers use it, and put back into an empty one.

SQLite is copied by its own online backup, PostgreSQL by `pg_dump` and `pg_restore`. Either shows
the database as it was at one moment, and holds up nobody who writes.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from sqlalchemy import Engine, inspect
from sqlalchemy.engine import URL

from rankscope.server.storage.database import migrate
from rankscope.server.storage.database.engine import open_engine

_SQLITE, _POSTGRESQL = b"SQLite format 3\0", b"PGDMP"
_REVISION = "SELECT version_num FROM alembic_version"


class NotCopied(RuntimeError):
    """A copy was not made or not put back; nothing was changed."""


def backup(engine: Engine, path: Path) -> None:
    """Writes a database into one file, which its owner alone may read.

    Args:
        engine: of a database that has the schema's tables.
        path: a new file. It appears when it is whole.

    Raises:
        NotCopied: there is such a file, or the database's own tools failed.
        OSError: the file cannot be written.
    """
    if path.exists():
        raise NotCopied(f"{path} exists, and is not written over: name a new file")
    with _appearing(path) as part:
        if engine.dialect.name == "sqlite":
            _copy_sqlite(Path(engine.url.database or ""), part)
        else:
            _run("pg_dump", engine.url, "--format=custom", f"--file={part}")


def restore(path: Path, url: URL) -> None:
    """Puts a copy back, as the database at `url`.

    Args:
        path: a file that `backup` wrote, of the same kind of database.
        url: for SQLite a file that does not exist, for PostgreSQL a database without tables.

    Raises:
        NotCopied: there is something at `url`; the file is no such copy, or damaged.
        SchemaError: a newer version of Rankscope has made it.
        OSError: the file cannot be read, or the database's not written.
    """
    with path.open("rb") as file:
        begin = file.read(len(_SQLITE))
    sqlite = url.get_backend_name() == "sqlite"
    if not begin.startswith(_SQLITE if sqlite else _POSTGRESQL):
        is_copy = begin.startswith((_SQLITE, _POSTGRESQL))
        raise NotCopied(
            f"{path} is a copy of another kind of database than {url.get_backend_name()}"
            if is_copy
            else f"{path} is no copy of a database: `rankscope db backup` makes one"
        )
    if sqlite:
        _restore_sqlite(path, Path(url.database or ""))
    else:
        _restore_postgresql(path, url)


def _restore_sqlite(path: Path, database: Path) -> None:
    if database.exists() and database.stat().st_size:
        raise NotCopied(f"{database} exists, and is not written over: name a new file in --db")
    with _appearing(database) as part:
        try:
            _copy_sqlite(path, part)
            with closing(sqlite3.connect(part)) as connection:
                wrong = [row[0] for row in connection.execute("PRAGMA quick_check(1)")]
                revision = connection.execute(_REVISION).fetchone()
        except sqlite3.DatabaseError as error:
            raise NotCopied(f"{path} is damaged, or no database of Rankscope: {error}") from error
        if wrong != ["ok"]:
            raise NotCopied(f"{path} is damaged: {wrong[0]}")
        migrate.check_revision(revision[0] if revision else None)


def _restore_postgresql(path: Path, url: URL) -> None:
    engine = open_engine(url.render_as_string(hide_password=False))
    try:
        there = inspect(engine).get_table_names()
    finally:
        engine.dispose()
    if there:
        raise NotCopied(
            f"the database has tables ({there[0]}, ...), and is not written over: name an "
            "empty one in --db"
        )
    said = _tool("pg_restore", ["--data-only", "--table=alembic_version", "--file=-", str(path)])
    rows = said.partition("FROM stdin;\n")[2].partition("\n\\.")[0].split()
    migrate.check_revision(rows[0] if rows else None)
    _run(
        "pg_restore",
        url,
        *("--single-transaction", "--exit-on-error", "--no-owner", "--no-privileges"),
        str(path),
    )


def _copy_sqlite(source: Path, target: Path) -> None:
    # In one step: it reads one state of the database, which those who write to its log do not
    # wait for. In several steps each commit of another process would make it begin again.
    with (
        closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=rw", uri=True)) as origin,
        closing(sqlite3.connect(target)) as copy,
    ):
        origin.backup(copy)
        # One file: a log beside it would have to be taken along.
        copy.execute("PRAGMA journal_mode = DELETE")


@contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """A file to write; it gets its name at the end of the block, and goes with an exception."""
    part = path.with_name(f"{path.name}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        yield part
        os.fsync(descriptor)
        part.replace(path)
    finally:
        os.close(descriptor)
        part.unlink(missing_ok=True)


def _run(tool: str, url: URL, *arguments: str) -> None:
    plain = url.set(drivername="postgresql", password=None)
    address = plain.render_as_string(hide_password=False)
    # Not on the command line, which everybody on the machine can read.
    secret = {} if url.password is None else {"PGPASSWORD": str(url.password)}
    _tool(tool, [f"--dbname={address}", "--no-password", *arguments], secret)


def _tool(name: str, arguments: Sequence[str], settings: dict[str, str] | None = None) -> str:
    program = shutil.which(name)
    if program is None:
        raise NotCopied(
            f"{name} is not on the PATH: install PostgreSQL's client programs (on Debian and "
            "Ubuntu: apt-get install postgresql-client), of the server's version or a newer one"
        )
    done = subprocess.run(
        [program, *arguments],
        env={**os.environ, **(settings or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise NotCopied(f"{name} failed: {'; '.join(lines[:3])}")
    return done.stdout
