"""Shared by the tests of pages."""

import pytest

from tests.support.servers.browser import chromium, watch


@pytest.fixture(scope="module")
def browser():
    """A real Chromium."""
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def context(browser, server):
    # One for all, so that plotly.js is loaded once; what a page stores is only its theme.
    context = browser.new_context(base_url=server, reduced_motion="reduce")
    yield context
    context.close()


@pytest.fixture
def open_page(context, server):
    """Opens a page and, at the end, fails where it complained or reached for another origin."""
    opened = []

    def open_page(path: str, *, width: int = 1400, height: int = 900, scheme: str = "light"):
        watched = watch(context.new_page(), server)
        opened.append(watched)
        watched.page.set_viewport_size({"width": width, "height": height})
        watched.page.emulate_media(color_scheme=scheme)
        watched.page.goto(path)
        return watched.page

    yield open_page
    for watched in opened:
        watched.page.close()
        watched.assert_clean()
