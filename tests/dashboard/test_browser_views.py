"""Views that their address keeps: the order of the runs, the axis of the charts; real Chromium."""

from dataclasses import replace

import httpx
import numpy as np
import pytest

from rankscope.agent.wire import codec
from rankscope.agent.wire.batch import Column
from tests.support.runs.fixture_run import SyntheticRun, post, wait_until_evaluated
from tests.support.servers.browser import HOW_TO_INSTALL, find_chromium, watched_page
from tests.support.servers.service import Service

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_chromium() is None, reason=HOW_TO_INSTALL),
]

RUNS = (
    SyntheticRun(run="ant", ranks=2, steps=120, desync=(1, 40), project="zoo"),
    SyntheticRun(run="bee", ranks=8, steps=40, project="farm"),
    SyntheticRun(run="cat", ranks=4, steps=80, project="farm"),
)
TIMED = SyntheticRun(run="timed", ranks=2, steps=200)
SECONDS = 3.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        for run in RUNS:
            post(service.url, run)
        headers = {"Content-Type": codec.CONTENT_TYPE}
        for batch in TIMED.batches(size=200):
            steps = np.arange(200)
            more = {
                "step_seconds": Column(steps, np.full(200, SECONDS)),
                "epoch": Column(steps, steps // 50 * 1.0),
            }
            sent = replace(batch, columns=batch.columns | more)
            answer = httpx.post(
                f"{service.url}/api/v1/ingest", content=codec.encode(sent), headers=headers
            )
            answer.raise_for_status()
        for run in (*RUNS, TIMED):
            wait_until_evaluated(service.url, run)
        yield service.url


def first_run(page, name: str) -> None:
    page.wait_for_function(
        "name => document.querySelector('#runs tr a.run')?.textContent === name", arg=name
    )


def test_runs_are_sorted_by_the_heading_of_a_column(browser, server):
    with watched_page(browser, server) as watched:
        page = watched.page
        page.goto("/?project=farm")
        page.wait_for_selector("#runs tr")
        heading = page.locator("th", has_text="Ranks")
        heading.get_by_role("button").click()
        first_run(page, "bee")
        assert heading.get_attribute("aria-sort") == "descending"
        heading.get_by_role("button").click()
        first_run(page, "cat")
        assert heading.get_attribute("aria-sort") == "ascending"
        assert page.evaluate("location.search") == "?project=farm&sort=ranks"
        # A link brings the same view.
        page.reload()
        first_run(page, "cat")
        heading.get_by_role("button").click()
        page.wait_for_function("() => location.search === '?project=farm'")
        assert heading.get_attribute("aria-sort") is None
        page.goto("/?sort=-alerts")
        first_run(page, "ant")
        page.goto("/?sort=nonsense")
        page.wait_for_selector("#runs tr")
        watched.assert_clean()


@pytest.mark.parametrize("width", [1400, 400])
def test_tags_are_shown_and_filter_the_list(browser, server, width):
    for run, tags in (("ant", ["nightly", "<b>large"]), ("bee", ["nightly"]), ("timed", ["once"])):
        asked = httpx.patch(f"{server}/api/v1/runs/{run}/tags", json={"add": tags})
        asked.raise_for_status()
    with watched_page(browser, server, width=width) as watched:
        page = watched.page
        page.goto("/?q=a")  # ant, cat, and bee, whose project is the farm
        page.wait_for_selector('#runs a.tag:has-text("nightly")')
        ant = page.locator("#runs tr", has=page.locator('a.run:text-is("ant")'))
        assert ant.locator("a.tag").all_inner_texts() == ["<b>large", "nightly"]
        assert page.locator("#tags option").evaluate_all("all => all.map((one) => one.value)") == [
            "<b>large",
            "nightly",
        ]
        ant.locator('a.tag:has-text("nightly")').click()
        page.wait_for_function("() => document.querySelectorAll('#runs tr').length === 2")
        # What was filtered by stays, and the address has both.
        assert page.evaluate("location.search") == "?q=a&tag=nightly"
        assert page.input_value("#tag") == "nightly"
        assert page.inner_text("#count") == "2 runs"
        page.fill("#tag", "no-such")
        page.wait_for_selector("#nothing:not([hidden])")
        page.click("#reset")
        page.wait_for_selector("#listing:not([hidden])")
        assert page.evaluate("location.search") == ""
        # The page of a run leads to those like it.
        page.goto("/runs/ant")
        page.locator('#facts a.tag:has-text("nightly")').click()
        page.wait_for_function("() => document.querySelectorAll('#runs tr').length === 2")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        watched.complaints = [said for said in watched.complaints if "404" not in said]
        watched.assert_clean()


def test_on_a_telephone_the_order_is_chosen_from_a_list(browser, server):
    with watched_page(browser, server, width=400) as watched:
        page = watched.page
        page.goto("/")
        page.wait_for_selector("#runs tr")
        page.select_option("#order", "-ranks")
        first_run(page, "bee")
        page.reload()
        first_run(page, "bee")
        assert page.input_value("#order") == "-ranks"
        assert page.evaluate("document.documentElement.scrollWidth") == 400
        watched.assert_clean()


def loss_axis(page) -> dict:
    return page.evaluate(
        """() => {
          const { layout, data } = document.querySelector('.chart[data-metric="loss"] .plot');
          const xs = data[0].x._inputArray ?? data[0].x;
          return { title: layout.xaxis.title.text, last: xs[xs.length - 1] };
        }"""
    )


def wait_for_axis(page, title: str) -> None:
    page.wait_for_function(
        """title => document.querySelector('.chart[data-metric="loss"] .plot')
          ?.layout?.xaxis.title.text === title""",
        arg=title,
    )


def test_the_axis_of_the_charts_is_kept_in_the_address(browser, server):
    with watched_page(browser, server, height=3000) as watched:
        page = watched.page
        page.goto("/runs/timed")
        wait_for_axis(page, "step")
        offered = page.locator("#axis option:not([hidden])").all_inner_texts()
        assert offered == ["step", "training time", "epoch"]
        page.select_option("#axis", "time")
        wait_for_axis(page, "training time (min)")
        assert loss_axis(page)["last"] == pytest.approx(199 * SECONDS / 60)
        page.reload()
        wait_for_axis(page, "training time (min)")
        page.select_option("#axis", "epoch")
        wait_for_axis(page, "epoch")
        assert page.evaluate("location.search") == "?axis=epoch"
        assert loss_axis(page)["last"] == pytest.approx(199 / 50)
        watched.assert_clean()


def test_what_is_pointed_at_and_zoomed_into_is_a_step_on_any_axis(browser, server):
    with watched_page(browser, server, height=3000) as watched:
        page = watched.page
        page.goto("/runs/timed?axis=time")
        wait_for_axis(page, "training time (min)")
        chart = page.locator('.chart[data-metric="loss"]')
        page.wait_for_selector('.chart[data-metric="accuracy"][data-drawn]')
        box = chart.locator(".nsewdrag").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.wait_for_function(
            "() => document.querySelector('[data-metric=accuracy] .readout').textContent"
        )
        said = page.inner_text('.chart[data-metric="accuracy"] .readout')
        assert 90 <= int(said.removeprefix("step ").partition(":")[0]) <= 110
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + box["height"] / 2, steps=5)
        page.mouse.up()
        page.wait_for_function("() => location.search.includes('from=')")
        steps = page.evaluate("Object.fromEntries(new URLSearchParams(location.search))")
        assert 90 <= int(steps["from"]) <= 110
        assert 140 <= int(steps["to"]) <= 160
        page.wait_for_function(
            """() => {
              const { x } = document.querySelector('.chart[data-metric="loss"] .plot').data[0];
              return (x._inputArray ?? x)[0] > 1;
            }"""
        )
        with page.expect_download() as download:
            chart.locator(".files > summary").click()
            chart.locator("[data-export=csv]").click()
        lines = download.value.path().read_text().splitlines()
        assert lines[0].startswith("step,")
        assert int(steps["from"]) <= int(lines[1].split(",")[0]) <= int(steps["to"])
        watched.assert_clean()
