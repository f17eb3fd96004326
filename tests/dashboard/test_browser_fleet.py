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
        runs = sum(one["runs"] for one in httpx.get(f"{server}/api/v1/projects").json()["items"])
        assert f"1 of {runs} runs running" in page.inner_text("#count")
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


def test_a_broken_run_leads_to_what_changed_since_the_last_good_one(browser, server):
    # Of those that passed before this one, of its project, the most alike, and of these the newest.
    for name, ago, settings in (
        ("oldest", 9000.0, {}),
        ("before", 6000.0, {}),
        ("other", 3000.0, {"lr": 0.1, "data": {"workers": 4}}),
    ):
        good = SyntheticRun(
            run=name, ranks=RUNS[0].ranks, steps=200, seconds_ago=ago, settings=settings
        )
        post(server, good, size=200)
        wait_until_evaluated(server, good)
    with watched_page(browser, server) as watched:
        page = watched.page
        page.goto("/runs/monday")
        page.wait_for_selector("#facts >> text=no settings differ")
        page.get_by_role("link", name="compare with before").click()
        page.wait_for_url("**/compare?runs=before&runs=monday")
        page.locator("#configuration").wait_for(state="attached")
        page.goto("/compare?runs=other&runs=monday")
        page.wait_for_selector("#headline.panel:not([aria-busy])")
        first = page.locator("#headline .cause").first.inner_text()
        assert first == "2 settings differ: lr 0.1 \u2192 \u2013, data.workers 4 \u2192 \u2013."
        panels = page.locator("main > section.panel").evaluate_all("(all) => all.map((p) => p.id)")
        assert panels.index("configuration-panel") < panels.index("bits-panel")
        # One that passes asks no such question.
        page.goto("/runs/before")
        page.wait_for_selector("#headline.is-ok")
        assert "Last passing run" not in page.inner_text("#facts")


def test_a_run_takes_one_line_and_all_are_counted(browser, server):
    many = [SyntheticRun(run=f"trial-{n:02}", ranks=1, steps=3) for n in range(55)]
    for run in many:
        post(server, run)
    with watched_page(browser, server) as watched:
        page = watched.page
        page.goto("/?order=newest")
        page.wait_for_function("() => document.querySelectorAll('#runs tr').length === 50")
        lines = page.evaluate(
            """() => [...document.querySelectorAll('#runs tr')]
              .map((row) => row.getBoundingClientRect().bottom)"""
        )
        assert sum(bottom <= 900 for bottom in lines) >= 25
        # A critical alert does not make it two: those with one are in the order of alerts first.
        total = sum(p["runs"] for p in httpx.get(f"{server}/api/v1/projects").json()["items"])
        assert total >= len(many) + len(RUNS) + 1
        assert page.inner_text("#count") == f"50 of {total} runs"
        page.goto("/?sort=-alerts")
        page.wait_for_selector("#runs a.worst")
        heights = page.evaluate(
            """() => [...document.querySelectorAll('#runs tr')]
              .map((row) => row.getBoundingClientRect().height)"""
        )
        assert max(heights) < 1.3 * min(heights), heights
        assert page.evaluate("document.documentElement.scrollWidth") == 1400
        # Of a title there is room for 60 characters.
        room = page.evaluate(
            """() => [...document.querySelectorAll('#runs a.worst')].map((link) => {
              const box = link.getBoundingClientRect();
              const room = link.closest('td').getBoundingClientRect().right - box.left;
              return room / (box.width / link.textContent.length);
            })"""
        )
        assert min(room) >= 60
        page.set_viewport_size({"width": 400, "height": 800})
        # A browser may resize its page a while after it was told to.
        page.wait_for_function(
            """() => [...document.querySelectorAll('#runs a.worst')]
              .some((link) => link.scrollWidth > link.clientWidth)"""
        )
        link = page.locator("#runs a.worst").first
        assert link.evaluate("(a) => getComputedStyle(a).textOverflow") == "ellipsis"
        page.set_viewport_size({"width": 1400, "height": 900})
        page.fill("#filter", "trial-0")
        page.wait_for_function("() => document.querySelector('#count').textContent === '10 runs'")
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
    named = [name for name in names if not name.startswith("trial-")]
    posted = {"healthy", "living", "monday", "tuesday"}
    assert sorted(named) == sorted(posted | ({"before", "oldest", "other"} & set(named)))
