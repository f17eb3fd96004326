"""A server of its own for each test, on every database."""

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
