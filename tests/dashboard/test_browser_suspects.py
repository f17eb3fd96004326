"""Who is marked on the charts as the rank at fault, and who is not; in Chromium."""

import pytest

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

# Of two ranks the bits do not show which one is wrong; here, rank 0 reports that it lost its state.
NAMED = SyntheticRun(run="named", ranks=2, steps=200, desync=(0, 137), reset=True)
UNTOLD = SyntheticRun(run="untold", ranks=2, steps=200, desync=(1, 137))

# Rows of a chart of cells on which at least one has the colour of a difference.
_ROWS_THAT_DIFFER = """(chart) => {
  const differs = document.querySelector(chart).data.filter(
    (trace) => ["distance", "unsized"].includes(trace.meta?.role) && trace.type === "heatmap");
  const listed = (values) => Array.from(values._inputArray ?? values);
  const found = new Set();
  for (const { y, z } of differs) {
    const cells = listed(z);
    listed(y).forEach((place, row) => {
      if (listed(cells[row]).some(Number.isFinite)) found.add(place);
    });
  }
  return [...found].sort();
}"""
_TICKS = """(chart) => document.querySelector(chart).layout.yaxis.ticktext.map(
  (text) => text.replace(/<[^>]*>/g, ""))"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        for run in (NAMED, UNTOLD):
            post(service.url, run)
        for run in (NAMED, UNTOLD):
            wait_until_evaluated(service.url, run)
        yield service.url


@pytest.fixture
def open_page(browser, server):
    with watched_page(browser, server, height=2400) as watched:

        def open_page(path):
            watched.page.goto(path)
            wait_until_drawn(watched.page)
            return watched.page

        yield open_page
        watched.assert_clean()


def test_of_two_ranks_the_one_that_the_headline_names_is_marked(open_page):
    page = open_page("/runs/named")
    assert "Rank 0's optimizer state differs" in page.inner_text("#headline")
    assert page.evaluate(_ROWS_THAT_DIFFER, "#heat") == [0]
    assert "rank 0 differs, first at step 137" in page.get_attribute("#heat", "aria-label")
    assert page.evaluate(_TICKS, "#matrix") == ["\u25b2 0", "1"]
    assert page.get_attribute("#matrix", "aria-label").endswith("; rank 0 at fault")
    page.wait_for_selector(".alert .plot[data-drawn]")
    assert page.evaluate(_ROWS_THAT_DIFFER, ".alert .plot[data-drawn]") == [0]


def test_of_two_ranks_of_which_nobody_knows_who_is_wrong_both_are(open_page):
    page = open_page("/runs/untold")
    assert "nothing shows which one is wrong" in page.inner_text("#headline")
    assert page.evaluate(_ROWS_THAT_DIFFER, "#heat") == [0, 1]
    assert page.evaluate(_TICKS, "#matrix") == ["0", "1"]
    assert "at fault" not in page.get_attribute("#matrix", "aria-label")
