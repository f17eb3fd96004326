"""What a person sees first: of runs that fail, end, are lost, or post nonsense; in Chromium."""

import re
import time
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import expect

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

BROKEN = SyntheticRun(run="broken", ranks=4, steps=200, desync=(2, 37))
LIVING = SyntheticRun(run="living", ranks=2, steps=400, state="running")
ERROR = "RuntimeError: CUDA error: an illegal memory access was encountered"


def report(origin: str, run: str, rank: int = 0, *, steps: int = 30, **fields) -> None:
    """One batch of a rank by hand: a loss and nothing else."""
    loss = {"steps": list(range(steps)), "values": [2.0 - 0.01 * step for step in range(steps)]}
    batch = {
        "run": run,
        "rank": rank,
        "seq": 0,
        "session": f"{rank}",
        "world_size": 2,
        "through_step": steps - 1,
        "columns": {"loss": loss},
        "hello": {"host": "node7", "pid": 4711, "started_at": time.time() - 60},
        **fields,
    }
    httpx.post(f"{origin}/api/v1/ingest", json=batch).raise_for_status()


def wait_for_alert(origin: str, run: str) -> None:
    deadline = time.monotonic() + 60
    while not httpx.get(f"{origin}/api/v1/runs/{run}/alerts").json()["items"]:
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        origin = service.url
        post(origin, BROKEN)
        post(origin, LIVING, 0, 200)
        report(origin, "crashed", 0, steps=21, state="failed", error=ERROR)
        report(origin, "crashed", 1, steps=24, state="failed", error="the other one is gone")
        report(origin, "together", 1, steps=21, state="failed", error=ERROR)
        report(origin, "together", 0, steps=21, state="failed", error="the other one is gone")
        report(origin, "plain", 0, state="finished")
        wait_until_evaluated(origin, BROKEN)
        yield origin


@pytest.fixture
def open_page(browser, server):
    """Opens one page and, at the end, fails where it complained or reached for another origin."""
    with watched_page(browser, server, height=2000) as watched:

        def open_page(path):
            watched.page.goto(path)
            if path.startswith("/runs/"):
                watched.page.wait_for_selector("#headline:not([aria-busy])")
            return watched.page

        yield open_page
        # What is not there (distances of a run without fingerprints) is reported on the page.
        watched.complaints = [said for said in watched.complaints if "404" not in said]
        watched.assert_clean()


def test_how_far_apart_and_when_it_was_found(open_page, server):
    [alert] = httpx.get(f"{server}/api/v1/runs/broken/alerts").json()["items"]
    text = open_page("/runs/broken").inner_text("#headline")
    [shown] = re.findall(r"(\S+) of the parameters' norm", text)
    assert float(shown) == pytest.approx(alert["evidence"]["sizes"][-1][2], rel=0.06)
    assert re.search(r"step 37 \(ended at 199\), found at (\d+ \w+, )?\d\d:\d\d", text)


def test_a_healthy_run_that_goes_on_is_fine_so_far(open_page, server):
    deadline = time.monotonic() + 180
    while httpx.get(f"{server}/api/v1/runs/living/verdict").json()["so_far"] != "pass":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    text = open_page("/runs/living").inner_text("#headline")
    assert "No problems found so far (" in text
    assert "checks passed on 2 ranks" in text


def test_a_run_that_crashed_says_which_rank_with_which_error(open_page, server):
    wait_for_alert(server, "crashed")
    page = open_page("/runs/crashed")
    text = page.inner_text("#headline")
    assert "The run failed" in text
    assert f"Rank 0 failed in step 21: {ERROR}" in text
    assert "What the others say follows from it: rank 1 (the other one is gone)" in text
    assert "node7, process 4711" in text
    assert "the whole traceback is in the output of rank 0" in text
    assert page.get_attribute("#headline", "class").endswith("is-critical")


def test_of_ranks_that_end_in_the_same_step_the_first_one_is_named(open_page, server):
    wait_for_alert(server, "together")
    text = open_page("/runs/together").inner_text("#headline")
    assert f"Rank 1 failed in step 21: {ERROR}" in text


def test_a_run_without_fingerprints_has_no_empty_controls(open_page):
    page = open_page("/runs/plain")
    # The name of a kind is no beginning of a sentence.
    assert "Desync" not in page.inner_text("#headline")
    wait_until_drawn(page)
    assert not page.is_visible("#stage")
    assert not page.is_visible("#heat-key")
    assert "No two ranks have posted a fingerprint" in page.inner_text("#heat")
    # Nothing between ranks and steps that are not there.
    assert page.locator("#heat .xtick, #heat .ytick").count() == 0
    assert "1 missing" in page.inner_text("#facts")


def test_the_curves_are_asked_for_before_the_maps_below_them(browser, server):
    asked = []
    with watched_page(browser, server, height=2400) as watched:
        watched.page.on("request", lambda request: asked.append(urlsplit(request.url).path))
        watched.page.goto("/runs/broken")
        wait_until_drawn(watched.page)
        watched.assert_clean()
    names = [path.rpartition("/")[2] for path in asked]
    maps = [n for n, name in enumerate(names) if name in ("divergence.json", "distances.json")]
    assert len(maps) == 2
    assert names.index("curves.json") < min(maps)
    # Together with what the headline says, and not after it.
    plotly = next(n for n, name in enumerate(names) if name.startswith("plotly"))
    assert names.index("metrics") < plotly


def test_what_the_page_asks_for_first_is_asked_for_once(browser, server):
    asked = []
    with watched_page(browser, server, height=2400) as watched:
        page = watched.page
        page.on("request", lambda request: asked.append(urlsplit(request.url).path))
        page.goto("/runs/broken")
        wait_until_drawn(page)
    run = "/api/v1/runs/broken"
    # It has ended and is judged: nothing that comes asks for more.
    first = (run, f"{run}/verdict", f"{run}/alerts", f"{run}/metrics")
    assert [asked.count(path) for path in first] == [1] * 4


def test_curves_stand_on_the_page_before_the_library_that_draws_them(open_page, server):
    page = open_page("/")
    held = []
    holding = True

    def hold(route):
        if holding:
            held.append(route)
        else:
            route.continue_()

    page.route("**/static/plotly-*", hold)
    page.goto("/runs/broken")
    sketch = page.locator('.chart[data-metric="loss"] .sketch')
    # Of four ranks a line each, within the chart, and the numbers of the axes.
    expect(sketch.locator("path[stroke-width]")).to_have_count(4)
    lines = [box.bounding_box() for box in sketch.locator("path[stroke-width]").all()]
    chart = page.locator('.chart[data-metric="loss"] .plot').bounding_box()
    for line in lines:
        assert chart["x"] < line["x"]
        assert line["x"] + line["width"] <= chart["x"] + chart["width"]
        assert line["width"] > chart["width"] / 2
        assert chart["y"] <= line["y"]
        assert line["y"] + line["height"] <= chart["y"] + chart["height"]
    numbers = sketch.locator("text").all_text_contents()
    assert {"0", "100", "step", "loss"} <= {*numbers}
    holding = False
    for route in held:
        route.continue_()
    wait_until_drawn(page)
    expect(page.locator(".sketch")).to_have_count(0)
    assert lines_of(page, "loss") == 4


def lines_of(page, metric):
    return page.evaluate(
        'metric => document.querySelector(`.chart[data-metric="${metric}"] .plot`)'
        ".data.filter((trace) => trace.meta?.role === 'raw').length",
        metric,
    )


def test_what_only_follows_makes_no_rank_suspicious(open_page, server):
    alerts = httpx.get(f"{server}/api/v1/runs/broken/alerts?consequences=true").json()["items"]
    assert any(alert["parent"] for alert in alerts)
    page = open_page("/runs/broken")
    page.wait_for_selector("#ranks-body tr")
    named = page.locator("#ranks-body tr:has(.badge:has-text('named by an alert'))")
    assert named.evaluate_all("rows => rows.map((row) => row.dataset.rank)") == ["2"]


def test_the_list_of_runs_says_what_is_wrong_with_each(open_page, server):
    [alert] = httpx.get(f"{server}/api/v1/runs/broken/alerts").json()["items"]
    page = open_page("/")
    page.get_by_role("link", name=alert["title"]).click()
    page.wait_for_url(f"**/runs/broken#alert-{alert['id']}")
    expect(page.locator(".alert.pointed")).to_contain_text(alert["title"])


def test_a_run_before_its_first_step_has_no_step(open_page, server):
    report(server, "early", steps=0, through_step=-1, columns={})
    page = open_page("/?q=early")
    page.wait_for_selector("#runs tr")
    assert page.inner_text("#runs td:nth-child(6)") == "\u2013"
    page = open_page("/runs/early")
    assert "-1" not in page.inner_text("#facts") + page.inner_text("#ranks-body")


def test_nonsense_in_an_address_is_left_out(open_page):
    page = open_page(
        "/runs/broken?from=abc&to=x&smoothing=9&step=-1&ranks=zzz&highlight=4-&stage=nosuch"
    )
    wait_until_drawn(page)
    page.wait_for_function(
        "() => document.querySelector('#matrix[data-drawn]') && !document.querySelector('.broken')"
    )
    assert not page.is_visible("#range")
    assert page.input_value("#smoothing") == "0"
    # The link of the alert that the headline is about.
    assert page.input_value("#stage") == "reduced_gradient"
    page = open_page("/runs/broken?from=90&to=20")
    assert not page.is_visible("#range")


@pytest.mark.parametrize(
    ("written", "said"),
    [("9", "No rank 9 in this run"), ("3-1", "is no list of ranks"), ("x", "is no list of ranks")],
)
def test_ranks_that_are_not_there_are_reported_and_the_charts_stay(open_page, written, said):
    page = open_page("/runs/broken?ranks=1")
    wait_until_drawn(page)
    page.fill("#ranks", written)
    page.wait_for_selector("#ranks-hint:not([hidden])")
    assert said in page.inner_text("#ranks-hint")
    assert page.get_attribute("#ranks", "aria-invalid") == "true"
    assert "ranks=1" in page.url
    page.fill("#ranks", "0,2-3")
    page.wait_for_selector("#ranks-hint", state="hidden")
    page.wait_for_function("() => location.search.includes('ranks=0')")


def test_the_enter_key_silences_as_the_button_does(open_page, server):
    page = open_page("/runs/broken")
    page.wait_for_selector("#headline.is-critical")
    page.locator(".alert").get_by_role("button", name="Silence").click()
    page.get_by_role("button", name="Cancel").click()
    page.wait_for_selector("#ask", state="detached")
    page.locator(".alert").get_by_role("button", name="Silence").click()
    with page.expect_response("**/silences") as answered:
        page.fill("#ask-name", "Ada")
        page.fill("#ask-reason", "known")
        page.keyboard.press("Enter")
    assert answered.value.status == 201
    # What is silenced is not what the page speaks of first.
    page.wait_for_selector("#headline.is-muted")
    assert "1 critical problem, silenced by Ada until" in page.inner_text("#headline h1")


def test_what_passes_because_it_is_silenced_does_not_read_as_fine(open_page, server):
    for silence in httpx.get(f"{server}/api/v1/runs/broken/silences").json()["items"]:
        httpx.delete(f"{server}/api/v1/silences/{silence['id']}").raise_for_status()
    [alert] = httpx.get(f"{server}/api/v1/runs/broken/alerts").json()["items"]
    said = {"kind": alert["kind"], "name": "Ada", "reason": "known", "seconds": 7200}
    # What was suspended since stands against a pass, too.
    for kind in (alert["kind"], "desync.parameters"):
        body = said | {"kind": kind}
        httpx.post(f"{server}/api/v1/runs/broken/silences", json=body).raise_for_status()
    assert httpx.get(f"{server}/api/v1/runs/broken/verdict").json()["verdict"] == "pass"
    page = open_page("/runs/broken")
    text = page.inner_text("#headline")
    assert page.locator("#headline.is-muted").count() == 1
    # With the day, if it ends tomorrow.
    assert re.search(r"1 critical problem, silenced by Ada until (\d+ \w+, )?\d\d:\d\d", text)
    assert alert["title"] in text
    assert "No problems" not in text
    page.goto("/")
    row = page.locator("#runs tr", has_text="broken")
    row.wait_for()
    assert row.locator(".badge.is-ok:has-text('pass')").count() == 0
    assert "critical silenced" in row.inner_text()
    # Taken back on the card: others see it without a reload.
    page.goto("/runs/broken")
    page.locator(".alert").get_by_role("button", name="End the silence").click()
    page.wait_for_selector("#headline.is-critical")
    httpx.post(f"{server}/api/v1/runs/broken/silences", json=said).raise_for_status()
    page.wait_for_selector("#headline.is-muted")


def test_a_chart_that_is_asked_for_anew_before_it_was_drawn(open_page):
    page = open_page("/")
    held = []

    def hold_the_first(route):
        if held:
            route.continue_()
        held.append(route)

    page.route("**/figures/curves.json*metric=loss*", hold_the_first)
    page.goto("/runs/living")
    page.wait_for_selector("#headline:not([aria-busy])")
    while not held:
        page.wait_for_timeout(50)
    page.keyboard.press("y")
    page.wait_for_selector('.chart[data-metric="loss"] button[aria-pressed="true"]')
    held[0].continue_()
    page.wait_for_function(
        """() => document.querySelector('.chart[data-metric="loss"] .plot')
          ?._fullLayout?.yaxis.type === 'log'"""
    )
    assert len(held) >= 2, "it was not asked for anew"
    assert page.locator('.chart[data-metric="loss"] .broken').count() == 0


@pytest.mark.parametrize(
    ("figure", "node"),
    [
        ("curves.json*metric=loss", '.chart[data-metric="loss"]'),
        ("divergence.json", "#heat"),
        ("distances.json", "#matrix"),
    ],
)
def test_what_became_of_an_answer_that_is_wanted_no_more_is_no_error(open_page, figure, node):
    page = open_page("/")
    held = []

    def hold_the_first(route):
        if held:
            route.continue_()
        held.append(route)

    page.route(f"**/figures/{figure}*", hold_the_first)
    page.goto("/runs/broken")
    page.wait_for_selector("#headline:not([aria-busy])")
    # Charts are asked for when they come near what is seen; alerts above may keep them from that.
    page.locator(node).scroll_into_view_if_needed()
    for _ in range(600):
        if held:
            break
        page.wait_for_timeout(50)
    page.evaluate("() => dispatchEvent(new PopStateEvent('popstate'))")
    page.wait_for_timeout(200)
    held[0].fulfill(status=404, content_type="application/json", body='{"detail": "gone"}')
    page.wait_for_selector(f"{node}[data-drawn]")
    assert not page.is_visible(f"{node} .broken")


def test_an_open_page_goes_on_when_its_server_is_back(browser, tmp_path):
    with Service(tmp_path) as service:
        report(service.url, "otter", state="running")
        with watched_page(browser, service.url) as watched:
            page = watched.page
            page.goto("/runs/otter")
            page.wait_for_selector("#headline:not([aria-busy])")
            service.stop()
            page.wait_for_selector("#error-notice:not([hidden])")
            assert "The server cannot be reached: no answer" in page.inner_text("#error-notice")
            page.wait_for_selector('#live[data-state="lost"]')
            assert page.is_visible("#facts")
            service.start()
            page.wait_for_selector("#error-notice", state="hidden")
            page.wait_for_selector('#live[data-state="live"]')
