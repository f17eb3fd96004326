"""The pages in a real Chromium, served by the real command, on runs posted through the ingest."""

import re
from urllib.parse import quote

import httpx
import numpy as np
import pytest

from rankscope.dashboard.figures import DARK, LIGHT
from rankscope.server.commands.client import Server
from rankscope.server.commands.run_facts import headline, load
from tests.support.runs.fixture_run import HOSTILE, SyntheticRun, post, wait_until_evaluated
from tests.support.servers.browser import (
    HOW_TO_INSTALL,
    find_chromium,
    wait_until_drawn,
    watched_page,
)
from tests.support.servers.charts import axis, drag, lines, parameters, wait_for_figure
from tests.support.servers.service import Service

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_chromium() is None, reason=HOW_TO_INSTALL),
]

BROKEN = SyntheticRun(run="broken", steps=400, desync=(2, 137), nan=(1, 300))
HEALTHY = SyntheticRun(run="healthy", ranks=2, steps=1500, spike=(1, 777))
MARKUP = SyntheticRun(
    run=HOSTILE, ranks=2, steps=60, hostile=True, told=True, desync=(1, 20), project=HOSTILE
)
TOLD = SyntheticRun(run="told", ranks=2, steps=200, told=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        for run in (BROKEN, HEALTHY, MARKUP, TOLD):
            post(service.url, run)
        for run in (BROKEN, HEALTHY, MARKUP, TOLD):
            wait_until_evaluated(service.url, run)
        yield service.url


def test_the_curves_are_the_numbers_that_were_posted_and_that_the_interface_gives(
    open_page, server
):
    page = open_page("/runs/broken", height=2400)
    wait_until_drawn(page)
    for metric in ("loss", "grad_norm", "step_seconds"):
        drawn = lines(page, metric)
        answer = httpx.get(
            f"{server}/api/v1/runs/broken/series", params={"metric": metric, "max_points": 600}
        ).json()
        assert set(drawn) == {f"rank {s['rank']}" for s in answer["series"]}
        for series in answer["series"]:
            steps, values = drawn[f"rank {series['rank']}"]
            assert steps.tolist() == series["steps"]
            answered = np.array(series["values"], float)
            assert np.array_equal(values, answered, equal_nan=True)
            assert np.array_equal(values, BROKEN.values(metric, series["rank"]), equal_nan=True)
    assert np.isnan(lines(page, "loss")["rank 1"][1][300])
    label = page.locator('.chart[data-metric="loss"] .plot').get_attribute("aria-label")
    assert "NaN at step 300, rank 1" in label


def test_the_headline_answers_what_since_when_who_and_where(open_page, server):
    (alert,) = httpx.get(f"{server}/api/v1/runs/broken/alerts").json()["items"]
    page = open_page("/runs/broken")
    page.wait_for_selector("#headline.is-critical")
    text = page.inner_text("#headline")
    for said in (
        "Critical problem",
        "Last identical",
        "step 136: a checkpoint saved up to then is good on all ranks",
        "step 137",
        "rank 2",
        "process ",
        "What to do",
        alert["title"],
        alert["remedy"].replace("`", ""),
    ):
        assert said in text
    assert alert["tensors"][0] in text
    # The card below opens where the alert began.
    page.wait_for_selector("#comparison h3", state="attached")
    assert page.inner_text("#matrix-title").endswith(f"at step {alert['first_step']}")
    assert page.input_value("#stage") == alert["stage"]
    assert alert["stage"].replace("_", " ") in text
    assert page.title().startswith("\u25b2")
    page.locator("#checks-panel .fold-button").click()
    page.wait_for_selector("#checks li")
    assert page.locator('#checks li[data-state="failed"]').count() >= 1
    consequences = page.locator(".alert summary", has_text="consequence")
    consequences.click()
    assert "rank.loss_outlier" in page.inner_text(".alert .consequences")


def test_a_healthy_run_reads_as_fine_and_names_what_was_not_checked(open_page, server):
    page = open_page("/runs/healthy")
    page.wait_for_selector("#headline:not([aria-busy])")
    # It is over: what lives is the page's connection.
    page.wait_for_selector('#live[data-state="live"] >> text=connected')
    verdict = httpx.get(f"{server}/api/v1/runs/healthy/verdict").json()
    for check in verdict["checks"]:
        row = page.locator(f'#checks li[data-name="{check["name"]}"]')
        assert row.get_attribute("data-state") == check["state"]


def test_events_arrive_without_a_reload(open_page, server):
    run = SyntheticRun(run="living", ranks=2, steps=400, state="running")
    post(server, run, 0, 100)
    page = open_page("/runs/living?q=loss", height=1600)
    page.evaluate("window.here = 'since the first load'")
    assert max(lines(page, "loss")["rank 0"][0]) == 99
    page.wait_for_selector('#live[data-state="live"] >> text=live')
    post(server, run, 100, 200)
    # Ranks post one after the other: the page may be drawn anew between the two.
    of_ranks = "plot.data.filter((line) => line.name?.startsWith('rank '))"
    wait_for_figure(
        page, f"{of_ranks}.every((line) => (line.x._inputArray ?? line.x).length === 200)"
    )
    page.wait_for_function("() => document.querySelector('#facts').innerText.includes('199')")
    assert page.evaluate("window.here") == "since the first load"
    assert np.array_equal(lines(page, "loss")["rank 1"][1], run.values("loss", 1)[:200])


def test_polling_takes_over_where_the_stream_does_not_get_through(browser, server):
    run = SyntheticRun(run="polled", ranks=2, steps=200, state="running")
    post(server, run, 0, 50)
    with watched_page(browser, server) as watched:
        page = watched.page
        page.route("**/stream", lambda route: route.abort())
        page.goto("/runs/polled")
        page.wait_for_selector('#live[data-state="poll"]')
        post(server, run, 50, 100)
        page.wait_for_function("() => document.querySelector('#facts').innerText.includes('99')")
        assert not watched.foreign


def test_a_hidden_page_pauses(open_page):
    page = open_page("/runs/broken")
    page.wait_for_selector('#live[data-state="live"]')
    # The last that is asked for when a page is new.
    page.wait_for_selector("#comparison h3", state="attached")
    hide = """(hidden) => {
      Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(hide, True)
    page.wait_for_selector('#live[data-state="paused"]')
    # What was under way comes to its end.
    page.wait_for_timeout(1000)
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(1500)
    assert asked == []
    page.evaluate(hide, False)
    page.wait_for_selector('#live[data-state="live"]')


@pytest.mark.parametrize("path", ["/", "/alerts", "run"])
def test_markup_in_names_stays_text(open_page, server, path):
    if path == "run":
        (run,) = [r for r in httpx.get(f"{server}/api/v1/runs").json()["items"] if "<" in r["id"]]
        path = "/runs/" + quote(run["id"], safe="")
    page = open_page(path, height=2400)
    page.wait_for_function("() => document.body.innerText.includes('<img src=x')")
    if path.startswith("/runs"):
        wait_until_drawn(page)
    assert page.locator('img[src="x"]').count() == 0
    assert page.locator("main b", has_text=re.compile("^bold$")).count() == 0
    assert page.evaluate("document.title") != "xss"


def test_a_link_brings_back_what_its_sender_saw(open_page):
    page = open_page(
        "/runs/broken?smoothing=0.6&log=loss&ranks=0,2&from=50&to=150&q=loss&highlight=0&step=140",
        height=1600,
    )
    wait_until_drawn(page)
    wait_for_figure(page, "plot._fullLayout.yaxis.type === 'log'")
    assert page.input_value("#smoothing") == "0.6"
    assert page.input_value("#ranks") == "0,2"
    assert page.input_value("#highlight") == "0"
    assert page.input_value("#filter") == "loss"
    assert page.locator(".chart").count() == 1
    drawn = lines(page, "loss")
    assert set(drawn) == {"rank 0", "rank 2"}
    assert drawn["rank 0"][0].min() == 50
    assert drawn["rank 0"][0].max() == 150
    low, high = axis(page, "loss")["range"]
    assert 45 < low <= 50
    assert 150 <= high < 155
    page.wait_for_function(
        "() => document.querySelector('#matrix-title').innerText.includes('140')"
    )


@pytest.mark.parametrize("path", ["/", "/alerts", "/runs/broken", "/runs/told"])
def test_nothing_sticks_out_at_400_pixels(open_page, path):
    page = open_page(path, width=400, height=3000)
    if not path.startswith("/runs"):
        page.wait_for_selector("#listing:not([hidden])")
        assert page.evaluate("document.documentElement.scrollWidth") == 400
        return
    # What a phone shows at first: what is wrong, three curves, and the names of what else there is.
    page.set_viewport_size({"width": 400, "height": 900})
    # As it was left by whoever was here before is how it would be.
    page.evaluate("localStorage.clear()")
    page.reload()
    wait_until_drawn(page)
    assert page.locator(".chart").count() == 3
    short = page.evaluate("document.documentElement.scrollHeight")
    page.click("#charts-all")
    folded = page.locator(".fold-button[aria-expanded=false]")
    folded.evaluate_all("(buttons) => buttons.map((button) => button.click())")
    page.set_viewport_size({"width": 400, "height": 12_000})
    page.wait_for_function("() => document.querySelectorAll('.chart').length > 3")
    wait_until_drawn(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    page.evaluate("localStorage.clear()")
    page.set_viewport_size({"width": 400, "height": 900})
    assert short < 0.5 * page.evaluate("document.documentElement.scrollHeight")


def test_the_keyboard_works(open_page):
    page = open_page("/runs/healthy", height=2400)
    wait_until_drawn(page)
    page.keyboard.press("y")
    wait_for_figure(page, "plot._fullLayout.yaxis.type === 'log'")
    assert parameters(page) == {"log": "all"}
    page.keyboard.press("y")
    wait_for_figure(page, "plot._fullLayout.yaxis.type === 'linear'")
    assert parameters(page) == {}
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "filter"
    page.keyboard.type("grad")
    page.wait_for_function("() => document.querySelectorAll('.chart').length === 2")
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    page.wait_for_selector("dialog#keys[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog#keys", state="hidden")


def test_zooming_one_chart_zooms_all_and_brings_finer_data(open_page):
    page = open_page("/runs/healthy", height=2400)
    wait_until_drawn(page)
    # 1,500 steps do not fit into 600 points: buckets, whose range keeps the spike of step 777.
    chart = '.chart[data-metric="loss"]'
    wait_for_figure(page, "plot.layout.meta.buckets === true")
    drag(page, chart, 0.45, 0.60)
    wait_for_figure(page, "plot.layout.meta.buckets === false")
    chosen = parameters(page)
    assert 600 <= int(chosen["from"]) < 777 < int(chosen["to"]) <= 960
    steps, values = lines(page, "loss")["rank 1"]
    assert np.array_equal(values, HEALTHY.values("loss", 1)[steps])
    assert values[steps == 777] == [50.0]
    wait_for_figure(page, f"plot._fullLayout.xaxis.range[0] > {int(chosen['from']) - 20}", "lr")
    box = page.locator(f"{chart} .nsewdrag").first.bounding_box()
    page.mouse.dblclick(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    wait_for_figure(page, "plot.layout.meta.buckets === true")
    assert parameters(page) == {}


def test_pointing_at_a_chart_points_at_the_same_step_in_the_others(open_page):
    page = open_page("/runs/broken", height=2600)
    wait_until_drawn(page)
    box = page.locator('.chart[data-metric="loss"] .nsewdrag').first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector('.chart[data-metric="grad_norm"] .crosshair', state="attached")
    said = page.inner_text('.chart[data-metric="grad_norm"] .readout')
    step = int(re.match(r"step (\d+):", said).group(1))
    assert 150 < step < 250
    shown = f"r2 {BROKEN.values('grad_norm', 2)[step]:.4g}"
    assert shown in said


def test_smoothing_is_off_at_first_and_keeps_the_raw_line(open_page):
    page = open_page("/runs/broken?q=loss", height=1600)
    wait_until_drawn(page)
    assert page.input_value("#smoothing") == "0"
    page.locator("#smoothing").fill("0.9")
    wait_for_figure(page, "plot.data.some((t) => t.meta && t.meta.role === 'smoothed')")
    assert parameters(page) == {"q": "loss", "smoothing": "0.9"}
    assert np.array_equal(lines(page, "loss")["rank 0"][1], BROKEN.values("loss", 0))


def test_a_step_chosen_in_the_heatmap_is_that_of_the_matrix(open_page):
    page = open_page("/runs/broken", height=2400)
    wait_until_drawn(page)
    box = page.locator("#heat .nsewdrag").first.bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.6)
    page.wait_for_function("() => new URLSearchParams(location.search).has('step')")
    step = int(parameters(page)["step"])
    assert 180 < step < 220
    page.wait_for_function(
        """(step) => {
          const title = document.querySelector("#matrix-title").innerText;
          const shown = Number(/step (\\d+)/.exec(title)?.[1]);
          return Math.abs(shown - step) <= 8;
        }""",
        arg=step,
    )
    assert "rank 2" in page.inner_text("#comparison")
    assert "conv1.weight" in page.inner_text("#comparison")


def test_an_alert_is_acknowledged_from_its_card(open_page, server):
    page = open_page("/runs/broken")
    card = page.locator(".alert").first
    card.get_by_role("button", name="Acknowledge").click()
    page.fill("#ask-name", "Ada")
    page.fill("#ask-reason", "on it")
    page.locator("#ask").get_by_role("button", name="Acknowledge").click()
    page.wait_for_selector(".alert .badge:has-text('acknowledged')")
    assert "Acknowledged by Ada (on it)" in card.inner_text()
    assert "acknowledged by Ada" in page.inner_text("#headline .state")
    alerts = httpx.get(f"{server}/api/v1/runs/broken/alerts").json()["items"]
    assert [a["acknowledged"] for a in alerts if a["kind"].startswith("desync")] == [True]
    card.get_by_role("button", name="Take acknowledgement back").click()
    card.get_by_role("button", name="Acknowledge", exact=True).wait_for()
    alerts = httpx.get(f"{server}/api/v1/runs/broken/alerts").json()["items"]
    assert not any(a["acknowledged"] for a in alerts)


def test_a_kind_is_silenced_from_a_card(open_page, server):
    page = open_page("/runs/healthy")
    alerts = httpx.get(f"{server}/api/v1/runs/healthy/alerts").json()["items"]
    kind = alerts[0]["kind"]
    card = page.locator(".alert", has_text=kind).first
    card.get_by_role("button", name="Silence").click()
    # The name is remembered; it is asked for in the same way for both.
    page.locator("#ask-name").fill("Ada")
    page.locator("#ask-reason").fill("known")
    with page.expect_response("**/silences") as answered:
        page.locator("#ask").get_by_role("button", name="Silence").click()
    silence = answered.value.json()
    said = (silence["kind"], silence["name"], silence["reason"])
    assert said == (kind, "Ada", "known")
    page.wait_for_selector(".alert .badge:has-text('silenced')")
    card.get_by_role("button", name="End the silence").click()
    card.get_by_role("button", name="Silence this kind").wait_for()
    assert httpx.get(f"{server}/api/v1/runs/healthy/silences").json()["items"] == []


def test_the_list_finds_runs_and_leads_to_them(open_page):
    page = open_page("/")
    page.wait_for_selector("#runs tr")
    page.locator("#filter").fill("heal")
    page.wait_for_function("() => document.querySelectorAll('#runs tr').length === 1")
    assert parameters(page) == {"q": "heal"}
    page.get_by_role("link", name="healthy").click()
    page.wait_for_url("**/runs/healthy")
    page.wait_for_selector("#headline:not([aria-busy])")


def test_the_alerts_of_all_runs_can_be_filtered(open_page):
    page = open_page("/alerts?severity=critical")
    page.wait_for_selector(".alert")
    assert page.input_value("#severity") == "critical"
    page.locator("#filter").fill("broken desync")
    page.wait_for_function("() => document.querySelectorAll('.alert').length === 1")
    page.get_by_role("link", name="broken").click()
    page.wait_for_selector(".alert.pointed")


def test_light_and_dark_follow_the_system_until_they_are_chosen(browser, server):
    with watched_page(browser, server, height=1600, scheme="dark") as watched:
        page = watched.page
        page.goto("/runs/broken?q=loss")
        wait_for_figure(page, f"plot._fullLayout.paper_bgcolor === '{DARK.panel}'")
        page.keyboard.press("t")
        wait_for_figure(page, f"plot._fullLayout.paper_bgcolor === '{LIGHT.panel}'")
        page.reload()
        wait_for_figure(page, f"plot._fullLayout.paper_bgcolor === '{LIGHT.panel}'")
        watched.assert_clean()


@pytest.mark.parametrize("run", [BROKEN, HEALTHY, MARKUP, TOLD], ids=lambda run: run.run[:7])
def test_the_terminal_has_the_headline_of_the_page(open_page, server, run):
    # The page makes its own, which knows the reader's clock; two that differ would be two answers.
    page = open_page(f"/runs/{quote(run.run, safe='')}")
    page.wait_for_selector("#headline h1")
    said = headline(load(Server(server), run.run))
    sign = page.locator("#headline .state .sign").inner_text()
    word = page.locator("#headline .state").inner_text().removeprefix(sign).strip()
    assert (word, page.locator("#headline h1").inner_text()) == (said.word, said.title)
    assert f"is-{said.tone}" in page.locator("#headline").get_attribute("class").split()
