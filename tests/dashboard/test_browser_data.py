"""What each rank read, on the page of a run, in a real Chromium."""

import httpx
import pytest

from tests.support.runs.fixture_run import SyntheticRun, post, wait_until_evaluated
from tests.support.runs.read_data import ReadRun
from tests.support.servers.browser import HOW_TO_INSTALL, find_chromium, watched_page
from tests.support.servers.service import Service

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_chromium() is None, reason=HOW_TO_INSTALL),
]

# Parts of their own; one rank with the part of another one; parts that overlap by a few samples.
RUNS = {
    2: ReadRun("two", ranks=2, steps=60, epoch=20),
    16: ReadRun("sixteen", ranks=16, steps=64, epoch=32, same=((5, 3),)),
    256: ReadRun("many", ranks=256, steps=40, epoch=20, own_seeds=True),
}
CHARTS = ("data-ranks", "data-steps", "overlap", "batch-sizes")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        for run in RUNS.values():
            run.post(service.url)
        for run in RUNS.values():
            wait_until_evaluated(service.url, run.posted, 300)
        yield service.url


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (400, "dark")])
@pytest.mark.parametrize("ranks", RUNS)
def test_what_each_rank_read(browser, server, ranks, width, scheme):
    with watched_page(browser, server, width=width, height=12_000, scheme=scheme) as watched:
        page = watched.page
        page.goto(f"/runs/{RUNS[ranks].run}")
        if width < 640:
            page.locator("#data-panel .fold-button").click()
        for name in CHARTS:
            page.wait_for_selector(f"#{name}[data-drawn]")
        summary = page.inner_text("#overlap-said")
        pixels = page.evaluate(
            """() => [...document.querySelectorAll('#data-panel .plot .bars path')]
              .filter((bar) => bar.getBBox().height > 1).length"""
        )
        assert pixels > 0
        # Nothing reaches beyond the window.
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        cells = page.evaluate(
            """() => {
              const { z } = document.querySelector('#overlap').data[0];
              return Array.from(z._inputArray ?? z, (row) => Array.from(row, (v) => v || 0));
            }"""
        )
        if ranks == 2:
            assert summary.startswith("No two ranks read the same samples")
            assert "3 passes through the data" in page.inner_text("#data-ranks-said")
            assert cells == [[0, 0], [0, 0]]
        elif ranks == 16:
            assert summary.startswith("Ranks 3 and 5 share most: 100 %")
            assert cells[3][5] == cells[5][3] == 1
            assert sum(map(sum, cells)) == 2
        else:
            # Each rank shuffles for itself: of a pass a quarter had been another rank's.
            said = page.inner_text("#data-ranks-said")
            assert 20 < float(said.split(" % by another one")[0].split()[-1]) < 35
            # Read at random, the ranks have all small parts in common.
            assert 0 < max(map(max, cells)) < 0.2
        href = page.get_attribute("#data-numbers", "href")
        assert len(httpx.get(f"{server}{href}").json()["ranks"]) == ranks
        watched.assert_clean()


def test_a_zoom_is_a_zoom_into_what_was_read(browser, server):
    with watched_page(browser, server, height=6000) as watched:
        page = watched.page
        page.goto("/runs/two?from=10&to=19")
        page.wait_for_selector("#data-ranks[data-drawn]")
        assert page.inner_text("#data-ranks-said").startswith("160 samples of 2 ranks")
        watched.assert_clean()


def test_a_run_that_says_nothing_of_its_data_has_no_such_section(browser, server):
    silent = SyntheticRun(run="silent", ranks=2, steps=40)
    post(server, silent)
    with watched_page(browser, server, height=6000) as watched:
        page = watched.page
        page.goto("/runs/silent")
        page.wait_for_selector("#time-panel:not([hidden])")
        assert not page.is_visible("#data-panel")
        page.goto("/runs/two")
        page.wait_for_selector("#contents a:visible:text-is('Data')")
        watched.assert_clean()
