"""A server for each test, or one for all that change nothing; on every database."""

import pytest

from rankscope.server.app import create_app
from rankscope.server.settings import Settings
from tests.support.servers.serve_app import serve_app


@pytest.fixture
def app(database_url):
    return create_app(Settings(database=database_url))


@pytest.fixture
def client(app):
    with serve_app(app) as made:
        yield made


@pytest.fixture(scope="module")
def shared_app(shared_database_url):
    return create_app(Settings(database=shared_database_url))


@pytest.fixture(scope="module")
def shared_client(shared_app):
    """For tests that ask, or are refused: a server takes longer to start than they take."""
    with serve_app(shared_app) as made:
        yield made
