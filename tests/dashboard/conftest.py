"""Shared by the tests of pages."""

import pytest

from tests.support.servers.browser import chromium


@pytest.fixture(scope="module")
def browser():
    """A real Chromium."""
    with chromium() as browser:
        yield browser
