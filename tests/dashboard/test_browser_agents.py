"""What agents say of themselves and of single tensors, of 2 and of 256 ranks; in Chromium."""

import httpx
import numpy as np
import pytest
from playwright.sync_api import expect

from rankscope.agent import wire
from tests.support.runs.fixture_run import SyntheticRun, post, wait_until_evaluated
from tests.support.servers.browser import HOW_TO_INSTALL, find_chromium, wait_until_drawn
from tests.support.servers.charts import lines, wait_for_figure
from tests.support.servers.service import Service

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_chromium() is None, reason=HOW_TO_INSTALL),
]

LARGE = SyntheticRun(run="large", ranks=256, steps=64, desync=(77, 20), buckets=4, told=True)
TOLD = SyntheticRun(run="told", ranks=2, steps=200, told=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        post(service.url, TOLD)
        wait_until_evaluated(service.url, TOLD)
        yield service.url


def test_256_ranks_are_bands_and_the_suspect_stands_out(open_page, server):
    post(server, LARGE, size=64)
    wait_until_evaluated(server, LARGE)
    page = open_page("/runs/large", height=2600)
    page.wait_for_function(
        "() => document.querySelector('#headline').innerText.includes('rank 77')"
    )
    wait_until_drawn(page)
    wait_for_figure(
        page, "plot.layout.meta.drawn === 'bands' && plot.layout.meta.named.includes(77)"
    )
    # Ranks with one sampling plan share a line; each has its own below, folded.
    page.wait_for_selector("#agent-panel:not([hidden])")
    most, few = page.locator("#agent .plans li").all_inner_texts()
    assert most == (
        "Ranks 0, 2-64, 66-128, 130-192, 194-255: losses, times and norms every step; model "
        "digests every 4 steps; fingerprints by tensor every 32 steps"
    )
    assert few.startswith("Ranks 1, 65, 129, 193: ")
    assert not page.locator("#agent-ranks").evaluate("node => node.open")
    # Rows that nobody sees are not made.
    assert page.locator("#agent-table tbody tr").count() == 0
    page.locator("#agent-ranks-title").click()
    expect(page.locator("#agent-table tbody tr")).to_have_count(256)
    assert page.locator("#agent .faults li").count() == 1
    assert "ranks 1-255" in page.inner_text("#agent .faults")
    assert page.locator("#ranks-body tr").count() <= 32
    assert page.get_attribute("#ranks-body tr:first-child", "data-rank") == "77"
    assert "rank 77" in page.get_attribute("#heat", "aria-label")


def test_the_agents_say_what_they_sample_what_it_costs_and_what_was_left_out(open_page, server):
    late = wire.Batch(
        run="told",
        rank=0,
        seq=999,
        session="fixture-0",
        project="digits",
        world_size=2,
        through_step=TOLD.steps - 1,
        state="finished",
        columns={"loss": wire.Column(np.arange(3), np.ones(3))},
    )
    headers = {"Content-Type": wire.CONTENT_TYPE}
    answer = httpx.post(f"{server}/api/v1/ingest", content=wire.encode(late), headers=headers)
    assert answer.json()["accepted"] == 3
    page = open_page("/runs/told", height=2400)
    page.wait_for_function(
        "() => document.querySelector('#agent').innerText.includes('3 points came after')"
    )
    text = page.inner_text("#agent-panel")
    for said in (
        "takes 0.6\u00a0% to 0.61\u00a0% of the step time",
        "clipping: RuntimeError: no such attribute",
        "rank 1, step 3",
        "12 points (memory full)",
    ):
        assert said in text, said
    # Of two ranks each has its line at once.
    assert page.locator("#agent-ranks").evaluate("node => node.open")
    first, second = page.locator("#agent-table tbody tr").all_inner_texts()
    every = ["0", "every step", "every step", "every 4 steps", "every 32 steps", "0.6\u00a0%", "0"]
    assert first.split("\t") == every
    assert "every 64 steps" in second
    assert "agent.fault" not in page.inner_text("#notes")


def test_numbers_of_tensors_are_folded_by_metric_and_found_by_the_filter(open_page):
    page = open_page("/runs/told", height=2400)
    wait_until_drawn(page)
    family = page.locator('details[data-family="weight_norm/watched/ema"]')
    assert (
        family.locator("summary").inner_text() == "weight_norm by tensor of watched/ema (40 series)"
    )
    assert page.locator('.chart[data-metric^="weight_norm/"]').count() == 0
    family.locator("summary").click()
    page.wait_for_function(
        "() => document.querySelectorAll('.chart[data-metric^=\"weight_norm/\"]').length === 12"
    )
    family.get_by_role("button", name="Show 12 more of 28").click()
    assert family.locator(".chart").count() == 24
    family.locator("input").fill("blocks.39.")
    page.wait_for_function(
        "() => document.querySelectorAll('.chart[data-metric^=\"weight_norm/\"]').length === 1"
    )
    metric = "weight_norm/blocks.39.attention.weight"
    steps, values = lines(page, metric)["rank 1"]
    assert steps.tolist() == list(range(0, 200, 32))
    assert np.array_equal(values, TOLD.layer(39, steps))
    page.locator("#filter").fill("norm/blocks")
    page.wait_for_function("() => document.querySelectorAll('#charts .chart').length === 24")
    assert page.inner_text("#charts-more").startswith("16 more fit the filter")
