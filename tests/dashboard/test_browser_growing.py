"""Curves of a living run: what is new of them travels, and what is shown is the whole."""

from dataclasses import replace

import httpx
import numpy as np
import pytest

from rankscope.agent.wire import codec
from tests.support.runs.fixture_run import SyntheticRun, post
from tests.support.servers.browser import HOW_TO_INSTALL, find_chromium, watched_page
from tests.support.servers.service import Service

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_chromium() is None, reason=HOW_TO_INSTALL),
]

# Lines, and bands over many ranks; of more steps than a chart has points, and so in buckets.
FEW = SyntheticRun(run="few", ranks=16, steps=560, state="running", nan=(3, 100))
MANY = SyntheticRun(run="many", ranks=20, steps=560, state="running")
LONG = SyntheticRun(run="long", ranks=4, steps=2400, state="running")
# First step after those that are there when the page opens, and how many come at a time.
BEGIN, PART = 400, 20
ROUNDS = 2


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        yield service.url


def shown(page) -> list:
    """Names, steps and values of the lines and areas of the loss."""
    return page.evaluate(
        """() => document.querySelector('.chart[data-metric="loss"] .plot').data.map((trace) => {
          const plain = (of) =>
            Array.from(of?._inputArray ?? of ?? [], (v) => Number.isFinite(v) ? v : null);
          return [trace.name, plain(trace.x), plain(trace.y)];
        })"""
    )


def last_step(lines: list) -> int:
    # Areas go there and back: their largest step.
    return max(step for _, steps, _ in lines for step in steps if step is not None)


def wait_for_step(page, step: int) -> None:
    page.wait_for_function(
        """step => {
          const data = document.querySelector('.chart[data-metric="loss"] .plot')?.data ?? [];
          return data.some(({ x }) => Array.from(x?._inputArray ?? x ?? []).some((v) => v >= step));
        }""",
        arg=step,
    )


@pytest.mark.parametrize(
    ("run", "begin", "part", "search"),
    [
        (FEW, BEGIN, PART, "?smoothing=0.5&log=all"),
        (MANY, BEGIN, PART, ""),
        (LONG, 2100, 40, ""),
    ],
)
def test_only_what_is_new_of_a_curve_is_sent(browser, server, run, begin, part, search):
    run = replace(run, run=f"{run.run}{len(search)}")
    post(server, run, 0, begin, size=begin)
    with watched_page(browser, server, height=3000) as watched:
        page = watched.page
        answers: list[tuple[bool, int]] = []

        def heard(response) -> None:
            if "curves.json" in response.url and "metric=loss" in response.url:
                answers.append(("known=" in response.url, len(response.body())))

        page.on("response", heard)
        page.goto(f"/runs/{run.run}{search}")
        wait_for_step(page, begin - part)
        for number in range(ROUNDS):
            post(server, run, begin + number * part, begin + (number + 1) * part, size=part)
            wait_for_step(page, begin + (number + 1) * part - 2 * run.steps // 600 - 1)
        # A new row of points may wait for the next turn of the charts.
        page.wait_for_timeout(3000)
        whole = max(size for asked, size in answers)
        parts = [size for asked, size in answers if asked]
        assert len(parts) >= ROUNDS
        # What is open is a twentieth, what is new another one, and all that is no points.
        assert sorted(parts)[len(parts) // 2] < 0.35 * whole, (whole, parts)
        grown = shown(page)
        page.reload()
        wait_for_step(page, last_step(grown))
        fresh = shown(page)
        assert [name for name, _, _ in grown] == [name for name, _, _ in fresh]
        for (_, xs, ys), (_, fresh_xs, fresh_ys) in zip(grown, fresh, strict=True):
            for grew, is_there in ((xs, fresh_xs), (ys, fresh_ys)):
                # None, of a gap, becomes NaN.
                np.testing.assert_allclose(
                    np.array(grew, np.float64), np.array(is_there, np.float64), rtol=1e-6
                )
        watched.assert_clean()


def test_a_point_that_comes_late_is_shown(browser, server):
    run = SyntheticRun(run="late", ranks=2, steps=200, state="running")
    batches = list(run.batches(size=50))
    headers = {"Content-Type": codec.CONTENT_TYPE}
    late = batches.pop(3)
    assert (late.rank, late.seq) == (1, 1)
    for batch in batches:
        httpx.post(
            f"{server}/api/v1/ingest", content=codec.encode(batch), headers=headers
        ).raise_for_status()
    with watched_page(browser, server) as watched:
        page = watched.page
        page.goto("/runs/late")
        wait_for_step(page, 199)
        assert 60 not in shown(page)[1][1]
        httpx.post(
            f"{server}/api/v1/ingest", content=codec.encode(late), headers=headers
        ).raise_for_status()
        page.wait_for_function(
            """() => {
              const { x } = document.querySelector('.chart[data-metric="loss"] .plot').data[1];
              return Array.from(x?._inputArray ?? x).includes(60);
            }"""
        )
        watched.assert_clean()
