"""The page of all runs at once, in a real Chromium, on runs posted through the ingest."""

import httpx
import pytest

from tests.support.runs.fixture_run import SyntheticRun, post, wait_until_evaluated
from tests.support.servers.browser import HOW_TO_INSTALL, find_chromium, watched_page
from tests.support.servers.service import Service

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_chromium() is None, reason=HOW_TO_INSTALL),
]

# Ranks 8 to 15 are on node1: it is named in two runs, in the second with another rank.
RUNS = (
    SyntheticRun(run="monday", ranks=16, steps=60, desync=(9, 20)),
    SyntheticRun(run="tuesday", ranks=16, steps=60, desync=(12, 20), seed=1, project="letters"),
    SyntheticRun(run="healthy", ranks=2, steps=60),
)
LIVING = SyntheticRun(run="living", ranks=2, steps=400, state="running")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        for run in RUNS:
            post(service.url, run)
        post(service.url, LIVING, 0, 50)
        for run in RUNS:
            wait_until_evaluated(service.url, run)
        yield service.url


def test_hosts_and_kinds_that_come_again_are_counted(server):
    answer = httpx.get(f"{server}/api/v1/fleet").raise_for_status().json()
    (host,) = [one for one in answer["hosts"] if one["runs"] >= 2]
    assert host["name"] == "node1"
    assert sorted(host["newest_runs"]) == ["monday", "tuesday"]
    assert "desync.gradients" in host["others"]
    kinds = {one["name"]: one for one in answer["kinds"]}
    assert kinds["desync.gradients"]["runs"] == 2
    assert kinds["desync.gradients"]["open"] == 2
    assert kinds["desync.gradients"]["others"] == ["node1"]
    letters = httpx.get(f"{server}/api/v1/fleet", params={"project": "letters"}).json()
    assert {run for one in letters["kinds"] for run in one["newest_runs"]} == {"tuesday"}


@pytest.mark.parametrize("width", [1400, 400])
def test_the_page_says_what_runs_and_which_host_it_is_again(browser, server, width):
    with watched_page(browser, server, width=width) as watched:
        page = watched.page
        page.goto("/fleet")
        host = page.locator('#hosts tr[data-name="node1"]')
        host.wait_for()
        assert "2 runs" in host.inner_text()
        assert "1 host in 2 runs or more" in page.inner_text("#hosts-said")
        assert page.locator("#running a.run").all_inner_texts() == ["living"]
        assert page.evaluate("document.documentElement.scrollWidth") == width
        page.select_option("#project", "letters")
        page.wait_for_function("() => location.search === '?project=letters'")
        page.wait_for_selector("#running-empty:not([hidden])")
        page.locator('#kinds a:has-text("desync.gradients")').click()
        page.wait_for_url("**/alerts?kind=desync.gradients")
        watched.assert_clean()


def test_the_list_has_running_runs_first_and_draws_their_losses(browser, server):
    with watched_page(browser, server) as watched:
        page = watched.page
        page.goto("/")
        page.wait_for_selector("#runs tr")
        names = page.locator("#runs a.run")
        assert names.first.inner_text() == "living"
        line = page.locator('.spark [data-run="monday"] path')
        line.wait_for(state="attached")
        # As the numbers go: down, from the left to the right.
        points = line.get_attribute("d").removeprefix("M").split("L")
        (x0, y0), (x1, y1) = (map(float, points[i].split()) for i in (0, -1))
        assert (x0, x1) == (0, 120)
        assert y1 > y0 + 14
        page.select_option("#order", "newest")
        page.wait_for_function("() => location.search === '?order=newest'")
        watched.assert_clean()


def test_a_page_of_runs_goes_on_where_the_one_before_ended(server):
    address, names, cursor = f"{server}/api/v1/runs", [], None
    while True:
        query = {"order": "attention", "limit": 1} | ({"cursor": cursor} if cursor else {})
        page = httpx.get(address, params=query).raise_for_status().json()
        names += [run["id"] for run in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert names[0] == "living"
    assert sorted(names) == ["healthy", "living", "monday", "tuesday"]
