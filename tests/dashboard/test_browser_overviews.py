"""Figures of a whole run, its table of ranks and its contents, in a real Chromium."""

import io
from dataclasses import replace
from itertools import pairwise

import httpx
import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import expect

from rankscope.agent.wire import codec
from rankscope.agent.wire.batch import Column, Fingerprint, Layers
from rankscope.dashboard.figures import LIGHT
from tests.support.runs.fixture_run import TENSORS, SyntheticRun, post, wait_until_evaluated
from tests.support.servers.browser import HOW_TO_INSTALL, find_chromium, watch
from tests.support.servers.service import Service

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_chromium() is None, reason=HOW_TO_INSTALL),
]

BROKEN = SyntheticRun(run="broken", steps=200, desync=(2, 77), told=True)
TIMED = SyntheticRun(run="timed", ranks=4, steps=64)
# Of each 1,024: who differs from step 4 on.
CROWDS = {"one": [777], "twelve": list(range(40, 1024, 82))}
SLOW = 3


def post_timed(server: str) -> None:
    """Rank 3 computes 30 ms longer, and the others wait for it; one tensor has no gradient."""
    headers = {"Content-Type": codec.CONTENT_TYPE}
    for batch in TIMED.batches(size=64):
        steps = np.arange(64)
        late = batch.rank == SLOW
        parts = {
            "step_seconds": 0.1,
            "data_seconds": 0.01,
            "compute_seconds": 0.09,
            "wait_seconds": 0.0 if late else 0.03,
        }
        columns = {name: Column(steps, np.full(64, value)) for name, value in parts.items()}
        layers = tuple(
            Layers(
                step=step,
                table="parameters",
                metric="grad_norm",
                values=np.array([1.0, 1e-8, 0.0 if step >= 32 else 1e-8]),
            )
            for step in range(0, 64, 8)
        )
        sent = replace(batch, columns=batch.columns | columns, layers=layers)
        answer = httpx.post(f"{server}/api/v1/ingest", content=codec.encode(sent), headers=headers)
        answer.raise_for_status()


def post_crowd(server: str, name: str, broken: list[int]) -> None:
    """1,024 ranks, eight steps, of which some differ from step 4 on."""
    run = SyntheticRun(run=name, ranks=1024, steps=8, buckets=4)
    steps = np.arange(8)
    sketches = np.random.default_rng(0).standard_normal((8, 3, 4))
    (first,) = replace(run, ranks=1).batches()
    with httpx.Client(base_url=server, timeout=60) as client:
        # The broken ones first: on a busy machine the last ones come when the first were judged.
        for rank in [*broken, *(rank for rank in range(1024) if rank not in broken)]:
            apart = rank in broken
            words = np.where(apart & (steps >= 4), 1000 + rank, steps + 1).astype(np.uint64)
            batch = replace(
                first,
                rank=rank,
                session=f"crowd-{rank}",
                world_size=1024,
                words={"parameters": Column(steps, words)},
                prints=tuple(
                    Fingerprint(
                        step=int(step),
                        stage="parameters",
                        table="parameters",
                        digests=np.array([words[step] + np.uint64(7 * t) for t in range(3)]),
                        sketches=sketches[step] * (1.01 if apart and step >= 4 else 1.0),
                    )
                    for step in steps[4:]
                ),
                columns={"loss": Column(steps, np.full(8, 3.0 if apart else 1.0))},
            )
            headers = {"Content-Type": codec.CONTENT_TYPE}
            content = codec.encode(batch)
            client.post("/api/v1/ingest", content=content, headers=headers).raise_for_status()
    wait_until_evaluated(server, run, 120)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        post(service.url, BROKEN)
        post_timed(service.url)
        wait_until_evaluated(service.url, BROKEN)
        wait_until_evaluated(service.url, TIMED)
        yield service


@pytest.fixture(scope="module")
def crowd(server):
    """Posts the run of a crowd, once, and for those alone who look at it: it takes a while."""
    posted = set()

    def crowd(name: str) -> str:
        if name not in posted:
            post_crowd(server.url, name, CROWDS[name])
            posted.add(name)
        return f"/runs/{name}"

    return crowd


@pytest.fixture(scope="module")
def context(browser, server):
    context = browser.new_context(base_url=server.url, reduced_motion="reduce")
    context.set_default_timeout(120_000)
    yield context
    context.close()


@pytest.fixture
def open_page(context, server):
    """Opens a page and, at the end, fails where it complained or reached for another origin."""
    opened = []

    def open_page(path, *, width=1400, height=6000):
        watched = watch(context.new_page(), server.url)
        opened.append(watched)
        watched.page.set_viewport_size({"width": width, "height": height})
        watched.page.goto(path)
        watched.page.wait_for_selector("#headline:not([aria-busy])")
        return watched.page

    yield open_page
    for watched in opened:
        watched.page.close()
        watched.assert_clean()


def drawn(page, selector: str, role: str, field: str = "customdata"):
    """[rows][columns] of a heatmap's cells; None where there is none."""
    page.wait_for_selector(f"{selector}[data-drawn]")
    return page.evaluate(
        """([selector, role, field]) => {
          const trace = document.querySelector(selector).data.find((t) => t.meta.role === role);
          const cells = trace?.[field]?._inputArray ?? trace?.[field];
          const plain = (v) => (Number.isFinite(v) ? v : null);
          return trace ? Array.from(cells, (row) => Array.from(row, plain)) : null;
        }""",
        [selector, role, field],
    )


def meta(page, selector: str) -> dict:
    page.wait_for_selector(f"{selector}[data-drawn]")
    return page.evaluate(f"document.querySelector('{selector}').layout.meta")


def coloured_rows(page, selector: str) -> np.ndarray:
    """bool [pixels of the plot's height]: whether the line of pixels has a differing colour."""
    page.wait_for_selector(f"{selector}[data-drawn]")
    area = page.locator(f"{selector} .nsewdrag").first.bounding_box()
    picture = page.locator(selector).screenshot()
    box = page.locator(selector).bounding_box()
    pixels = np.array(Image.open(io.BytesIO(picture)).convert("RGB")).astype(int)
    top, left = int(area["y"] - box["y"]), int(area["x"] - box["x"])
    pixels = pixels[top : top + int(area["height"]), left : left + int(area["width"])]
    colors = [[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in LIGHT.differing]
    # Between any two neighbours of the scale.
    scale = np.concatenate([np.linspace(a, b, 20) for a, b in pairwise(colors)])
    nearest = np.abs(pixels[:, :, None, :] - scale).max(axis=-1).min(axis=-1)
    return (nearest < 12).mean(axis=1) > 0.2


@pytest.mark.parametrize("name", CROWDS)
def test_of_1024_ranks_each_broken_one_has_coloured_pixels(open_page, crowd, name):
    broken = CROWDS[name]
    page = open_page(crowd(name))
    leavers = meta(page, "#heat")["leavers"]
    assert sorted(map(int, leavers)) == broken
    for selector in ("#heat", "#matrix"):
        rows = meta(page, selector)["rows"]
        lines = coloured_rows(page, selector)
        of_each = len(lines) / rows
        # Rows of their own, at the top; what a row has is at least half of it.
        for row in range(len(broken)):
            band = lines[int(row * of_each) : max(int((row + 1) * of_each), int(row * of_each) + 1)]
            assert band.mean() >= 0.5, (selector, row)
    ticks = page.evaluate("document.querySelector('#heat').layout.yaxis.ticktext")
    assert [str(rank) for rank in broken] == ticks[: len(broken)]
    # The same for any metric: here the losses differ.
    assert meta(page, "#rank-map")["names"][: len(broken)] == [f"rank {r}" for r in broken]


def test_a_vanished_gradient_is_seen_in_the_layers(open_page):
    page = open_page("/runs/timed")
    small = drawn(page, "#layers", "value")
    assert small[0] == pytest.approx([1.0] * 8)
    assert small[1] == pytest.approx([1e-8] * 8)
    zero = drawn(page, "#layers", "zero", "z")
    assert zero == [[None] * 8, [None] * 8, [None] * 4 + [1] * 4]
    assert meta(page, "#layers")["names"] == list(TENSORS.names)
    assert "zero in fc.weight" in page.inner_text("#layers-said")


def test_a_metric_of_all_ranks_over_the_steps(open_page):
    page = open_page("/runs/timed")
    page.wait_for_selector("#rank-map[data-drawn]")
    page.select_option("#by", "wait_seconds")
    meta_of = "document.querySelector('#rank-map').layout.meta"
    page.wait_for_function(f"() => {meta_of}.summary.startsWith('wait_seconds')")
    waits = drawn(page, "#rank-map", "value")
    assert [row[0] for row in waits] == pytest.approx([0.03, 0.03, 0.03, 0.0])
    assert "by=wait_seconds" in page.url
    page.locator("#rel").click()
    page.wait_for_function(f"() => {meta_of}.relative")
    ratios = drawn(page, "#rank-map", "value")
    assert [row[0] for row in ratios] == pytest.approx([1.0, 1.0, 1.0, 0.0])


def test_the_time_of_a_step_is_divided_rank_by_rank(open_page):
    page = open_page("/runs/timed")
    facts = meta(page, "#times")
    of = facts["milliseconds"]
    assert of["compute"] == pytest.approx({"0": 60, "1": 60, "2": 60, "3": 90})
    assert of["wait for other ranks"] == pytest.approx({"0": 30, "1": 30, "2": 30, "3": 0})
    assert of["data"] == pytest.approx({str(rank): 10 for rank in range(4)})
    assert facts["wait_share"] == pytest.approx(0.225)
    said = page.inner_text("#times-said")
    assert (
        "rank 3 holds the others up: waits 0 ms (the others 30), data 10 ms (the others 10)" in said
    )
    assert "computing 90 ms (the others 60)" in said
    page.wait_for_selector("#shares[data-drawn]")
    shares = page.evaluate(
        """document.querySelector('#shares').data
          .map((line) => [line.name, (line.y._inputArray ?? line.y)[5]])"""
    )
    assert dict(shares) == pytest.approx({"wait for other ranks": 0.225, "data": 0.1})


def post_scaled(server: str, run: str, ranks: int, rate: float, **settings: object) -> None:
    """A run of a project of its own whose ranks get `rate` samples a second done."""
    made = SyntheticRun(run=run, ranks=ranks, steps=64, project="scaling", settings=settings)
    headers = {"Content-Type": codec.CONTENT_TYPE}
    for batch in made.batches(size=64):
        # Slow at first, as the median does not notice.
        rates = np.where(np.arange(64) < 8, rate / 10, rate + batch.rank)
        columns = {"samples_per_second": Column(np.arange(64), rates)}
        sent = replace(batch, columns=batch.columns | columns)
        answer = httpx.post(f"{server}/api/v1/ingest", content=codec.encode(sent), headers=headers)
        answer.raise_for_status()


def test_efficiency_against_runs_with_fewer_ranks(open_page, server):
    same = {"parameters_digest": "a", "threads": 1}
    post_scaled(server.url, "on-2", 2, 1000.5, **same)
    post_scaled(server.url, "on-4-before", 4, 10.0, **same)
    post_scaled(server.url, "on-4", 4, 900.0, **same)
    # Another model, and a run on more ranks: what they do says nothing.
    post_scaled(server.url, "other-2", 2, 9000.0, parameters_digest="b", threads=1)
    post_scaled(server.url, "on-16", 16, 700.0, **same)
    post_scaled(server.url, "on-8", 8, 750.0, **same)
    page = open_page("/runs/on-8")
    said = meta(page, "#scaling")["summary"]
    assert said == (
        "754 samples a second and rank on 8 ranks, 75% of the 1,001 samples on 2 (run on-2)"
    )
    assert page.inner_text("#scaling-said") == said
    points = page.evaluate(
        """[...document.querySelectorAll('#scaling')].map(({ data: [line] }) =>
          [line.x, line.y].map((values) => [...(values._inputArray ?? values)]))[0]"""
    )
    assert points[0] == [2, 4, 8]
    assert points[1] == pytest.approx([1, 901.5 / 1001, 753.5 / 1001])
    # Where there is nothing to compare with there is no empty panel.
    page = open_page("/runs/on-2")
    page.wait_for_selector("#times[data-drawn]")
    assert not page.is_visible("#scaling-panel")


def test_the_table_of_ranks_sorts_filters_and_groups(open_page, crowd):
    page = open_page(crowd("one"))
    first = "#ranks-body tr[data-rank]:first-child"
    assert page.get_attribute(first, "data-rank") == "777"
    page.get_by_role("button", name="Loss", exact=True).click()
    page.wait_for_function("() => new URLSearchParams(location.search).get('rsort') === '-loss'")
    assert page.get_attribute(first, "data-rank") == "777"
    assert page.get_attribute("#ranks-head th:nth-child(5)", "aria-sort") == "descending"
    page.get_by_role("button", name="Rank", exact=True).click()
    page.get_by_role("button", name="Rank", exact=True).click()
    page.wait_for_selector("#ranks-body tr[data-rank='1023']:first-child")
    page.locator("#ranks-filter").fill("40-43")
    page.wait_for_function("() => document.querySelectorAll('#ranks-body tr').length === 4")
    assert "4 fit the filter" in page.inner_text("#ranks-summary")
    page.locator("#ranks-filter").fill("")
    page.wait_for_function("() => !location.search.includes('rq')")
    page.locator("#ranks-hosts").click()
    page.wait_for_selector("#ranks-body tr.host")
    # A link brings it back.
    page.reload()
    page.wait_for_selector("#ranks-body tr.host")
    assert page.get_attribute("#ranks-body tr[data-rank]", "data-rank") == "1023"


def test_an_alert_has_its_chart_beside_it_and_leads_to_where_it_shows(open_page, server):
    items = httpx.get(f"{server.url}/api/v1/runs/broken/alerts").json()["items"]
    (alert,) = [a for a in items if a["kind"].startswith("desync")]
    page = open_page("/runs/broken", height=900)
    card = page.locator(f"#alert-{alert['id']}")
    card.wait_for()
    # At once: a page that has just been told something new draws its alerts again.
    page.evaluate("id => document.getElementById(id).scrollIntoView()", f"alert-{alert['id']}")
    chart = f"#alert-{alert['id']} .alert-plot"
    assert meta(page, chart)["leavers"] == {"2": 77}
    card.get_by_role("button", name="Show on the charts").click()
    page.wait_for_function("() => new URLSearchParams(location.search).get('step') === '77'")
    page.wait_for_function(
        """() => {
          const box = document.querySelector('#heat').getBoundingClientRect();
          return box.top < innerHeight && box.bottom > 0;
        }"""
    )


def test_the_contents_stay_and_sections_fold(open_page):
    page = open_page("/runs/timed", height=800)
    page.wait_for_selector("#contents a")
    page.wait_for_selector("#layers-panel:not([hidden])")
    names = page.locator("#contents a:visible").all_inner_texts()
    sections = ["Curves", "Divergence", "Layers", "Rank by rank", "Time", "Ranks", "Checks"]
    assert [name for name in names if name in sections] == sections
    page.locator("#contents").get_by_role("link", name="Time").click()
    page.wait_for_function(
        "() => document.querySelector('#contents').getBoundingClientRect().top < 20"
    )
    page.wait_for_selector("#times[data-drawn]")
    # Checks are one line until they are wanted.
    assert not page.is_visible("#checks")
    assert "passed" in page.inner_text("#checks-count")
    page.locator("#contents").get_by_role("link", name="Checks").click()
    page.wait_for_selector("#checks li")
    page.locator("#time-panel .fold-button").click()
    assert not page.is_visible("#times")
    page.reload()
    page.wait_for_selector("#time-panel:not([hidden])")
    assert not page.is_visible("#times")
    page.locator("#time-panel .fold-button").click()
    page.locator("#checks-panel .fold-button").click()


def test_a_chart_can_be_saved_as_numbers_picture_and_drawing(open_page, tmp_path):
    page = open_page("/runs/timed")
    card = '.chart[data-metric="loss"]'
    page.wait_for_selector(f"{card}[data-drawn]")
    saved = {}
    for kind in ("csv", "png", "svg"):
        page.locator(f"{card} .files > summary").click()
        with page.expect_download() as download:
            page.locator(f"{card} [data-export={kind}]").click()
        assert download.value.suggested_filename == f"loss.{kind}"
        download.value.save_as(tmp_path / kind)
        saved[kind] = (tmp_path / kind).read_bytes()
    text = saved["csv"].decode().splitlines()
    assert text[0] == "step,rank 0,rank 1,rank 2,rank 3"
    assert len(text) == 65
    wanted = [5.0, *(TIMED.values("loss", rank)[5] for rank in range(4))]
    assert [float(cell) for cell in text[6].split(",")] == wanted
    assert saved["png"].startswith(b"\x89PNG")
    assert b"<svg" in saved["svg"][:200]
    page.locator("#layers-files summary").click()
    with page.expect_download() as download:
        page.locator("#layers-files [data-export=csv]").click()
    download.value.save_as(tmp_path / "cells")
    cells = (tmp_path / "cells").read_text().splitlines()
    assert cells[0] == "row,step,what,value"
    assert "fc.weight,32,zero," in cells


def test_the_keyboard_reaches_the_steps_of_a_chart(open_page):
    page = open_page("/runs/timed")
    card = '.chart[data-metric="loss"]'
    page.wait_for_selector(f"{card}[data-drawn]")
    page.locator(f"{card} .plot").focus()
    said = f"document.querySelector('{card} .readout').textContent"
    for key, step in (("End", 63), ("ArrowLeft", 62), ("Home", 0), ("ArrowRight", 1)):
        page.keyboard.press(key)
        page.wait_for_function(f"() => {said}.startsWith('step {step}:')")
    # The others follow, as they follow the pointer.
    other = '.chart[data-metric="grad_norm"] .readout'
    assert page.inner_text(other).startswith("step 1:")
    assert page.locator(f"{card} .crosshair").count() == 1
    page.keyboard.press("Escape")
    page.wait_for_function(f"() => document.querySelector('{card} .readout').textContent === ''")


def test_a_spike_is_cut_off_until_all_is_wanted(open_page, server):
    run = SyntheticRun(run="spiky", ranks=2, steps=200, spike=(1, 100))
    post(server.url, run)
    page = open_page("/runs/spiky")
    card = '.chart[data-metric="loss"]'
    page.wait_for_selector(f"{card}[data-drawn]")
    top = f"document.querySelector('{card} .plot')._fullLayout.yaxis.range[1]"
    assert page.evaluate(top) < 10
    page.get_by_role("button", name="Show all values of loss", exact=True).click()
    page.wait_for_function(f"() => {top} > 50")
    assert "whole=loss" in page.url
    # Where nothing is cut off there is nothing to click.
    assert not page.locator('.chart[data-metric="lr"]').get_by_text("all", exact=True).is_visible()
    page.get_by_role("button", name="Show all values of loss", exact=True).click()
    page.wait_for_function(f"() => {top} < 10")


def test_the_gradient_noise_is_a_curve_where_it_can_be_computed(open_page, server):
    run = SyntheticRun(run="noisy", ranks=4, steps=200)
    post(server.url, run)
    page = open_page("/runs/noisy")
    page.wait_for_selector("#noise[data-drawn]")
    names = page.evaluate("document.querySelector('#noise').data.map((line) => line.name)")
    assert names == ["noise scale", "batch"]
    assert "batches of a rank at step 199" in page.inner_text("#noise-said")
    assert page.locator("#noise .lines path").count() == 2
    # It takes fifty steps.
    few = SyntheticRun(run="few", ranks=4, steps=40)
    post(server.url, few)
    page = open_page("/runs/few")
    page.wait_for_selector('.chart[data-metric="loss"][data-drawn]')
    page.wait_for_selector("#rank-map[data-drawn]")
    assert not page.is_visible("#noise-panel")


def test_the_words_do_not_wait_for_the_library_that_draws(context, server):
    page = context.new_page()
    page.route("**/plotly-*.js", lambda route: None)  # never answered
    page.goto("/runs/broken")
    expect(page.locator("#headline.is-critical")).to_contain_text("Critical problem")
    expect(page.locator("#ranks-body tr")).to_have_count(4)
    assert page.evaluate("typeof Plotly") == "undefined"
    page.close()
