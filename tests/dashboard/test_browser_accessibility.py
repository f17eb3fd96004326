"""Every page, looked through by axe-core: no finding that is serious or critical."""

import pytest
from axe_playwright_python.sync_playwright import Axe

from tests.support.runs.fixture_run import SyntheticRun, post, wait_until_evaluated
from tests.support.servers.browser import (
    HOW_TO_INSTALL,
    find_chromium,
    wait_until_drawn,
    watched_page,
)
from tests.support.servers.service import Service

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_chromium() is None, reason=HOW_TO_INSTALL),
]

BROKEN = SyntheticRun(run="broken", steps=200, desync=(2, 77), nan=(1, 150), told=True)
SOUND = SyntheticRun(run="sound", ranks=2, steps=200)
PAGES = (
    "/",
    "/fleet",
    "/alerts",
    "/notifications",
    "/login",
    "/compare?runs=broken,sound",
    "/runs/broken",
    "/runs/sound",
    "/runs/nobody",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        for run in (BROKEN, SOUND):
            post(service.url, run, size=200)
            wait_until_evaluated(service.url, run)
        yield service.url


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (400, "dark")])
@pytest.mark.parametrize("path", PAGES)
def test_no_serious_finding(browser, server, path, width, scheme):
    with watched_page(browser, server, width=width, height=6000, scheme=scheme) as watched:
        page = watched.page
        page.goto(path)
        page.wait_for_selector("main")
        if path in ("/runs/broken", "/runs/sound"):
            wait_until_drawn(page)
            # What is folded is of the page, too.
            folded = page.locator(".fold-button[aria-expanded=false]")
            folded.evaluate_all("(buttons) => buttons.map((button) => button.click())")
        page.wait_for_timeout(1500)
        found = Axe().run(page).response["violations"]
        serious = {
            finding["id"]: [node["html"][:200] for node in finding["nodes"]][:5]
            for finding in found
            if finding["impact"] in ("serious", "critical")
        }
        assert serious == {}
        # It has looked: a page without a title or a language is found.
        assert page.evaluate("document.title && document.documentElement.lang")
