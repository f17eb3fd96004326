"""What pages say without runs, and when their server is gone; in Chromium."""

import pytest

from tests.support.runs.fixture_run import SyntheticRun, post
from tests.support.servers.browser import HOW_TO_INSTALL, find_chromium, watched_page
from tests.support.servers.service import Service

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_chromium() is None, reason=HOW_TO_INSTALL),
]


def test_a_server_without_runs_says_what_to_do(browser, tmp_path):
    with Service(tmp_path) as service, watched_page(browser, service.url) as watched:
        watched.page.goto("/")
        watched.page.wait_for_selector("#empty:not([hidden])")
        text = watched.page.inner_text("#empty")
        assert "agent.attach(model, optimizer)" in text
        assert f"RANKSCOPE_SERVER={service.url}" in text
        watched.assert_clean()


def test_a_server_that_goes_away_is_reported_and_its_return_too(browser, tmp_path):
    with Service(tmp_path) as service, watched_page(browser, service.url) as watched:
        watched.page.goto("/")
        watched.page.wait_for_selector("#empty:not([hidden])")
        service.stop()
        watched.page.wait_for_selector("#error-notice:not([hidden])")
        assert "cannot be reached" in watched.page.inner_text("#error-notice")
        service.start()
        watched.page.wait_for_selector("#error-notice", state="hidden")


def test_a_run_page_says_and_dims_when_its_server_is_gone(browser, tmp_path):
    with Service(tmp_path) as service:
        run = SyntheticRun(run="living", ranks=2, steps=400, state="running")
        post(service.url, run, 0, 50)
        context = browser.new_context(base_url=service.url)
        page = context.new_page()
        page.goto("/runs/living")
        page.wait_for_selector('#live[data-state="live"]')
        service.stop()
        page.wait_for_selector("body.unreachable", timeout=5000)
        assert "cannot be reached" in page.inner_text("#error-notice")
        opacity = "getComputedStyle(document.querySelector('#facts')).opacity"
        assert float(page.evaluate(opacity)) < 1
        before = page.inner_text("#facts")
        page.wait_for_function(
            "(before) => document.querySelector('#facts').innerText !== before", arg=before
        )
        service.start()
        page.wait_for_selector("body:not(.unreachable)", timeout=60_000)
        context.close()
