"""`rankscope report`: one file, opened from the disk in a real browser with the server gone."""

import os
import re
import subprocess

import pytest

from rankscope.dashboard.report import Chart, Report, render
from rankscope.server.commands.run_facts import Headline
from rankscope.server.demo.processes import RANKSCOPE
from tests.support.runs.fixture_run import HOSTILE, SyntheticRun, post, wait_until_evaluated
from tests.support.servers.browser import HOW_TO_INSTALL, find_chromium
from tests.support.servers.service import Service

pytestmark = pytest.mark.e2e

RANKS = 64
BROKEN = SyntheticRun(
    run="broken", ranks=RANKS, steps=400, desync=(17, 137), nan=(1, 300), buckets=4, told=True
)
MARKUP = SyntheticRun(run=HOSTILE, ranks=2, steps=60, hostile=True, told=True, desync=(1, 20))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Path of the report of each run, and the alerts of the broken one; the server is gone."""
    folder = tmp_path_factory.mktemp("report")
    with Service(folder / "server") as service:
        for run in (BROKEN, MARKUP):
            post(service.url, run)
        for run in (BROKEN, MARKUP):
            wait_until_evaluated(service.url, run)
        for run, name in ((BROKEN, "broken"), (MARKUP, "markup")):
            command = [*RANKSCOPE, "report", run.run, "-o", folder / f"{name}.html"]
            done = subprocess.run(
                command,
                env={**os.environ, "RANKSCOPE_SERVER": service.url},
                capture_output=True,
                text=True,
                check=False,
                timeout=120,
            )
            assert done.returncode == 0, done.stderr
            assert "MB" in done.stdout
        missing = [*RANKSCOPE, "report", "nobody", "-o", folder / "no.html", "--server"]
        done = subprocess.run([*missing, service.url], capture_output=True, text=True, check=False)
        assert (done.returncode, (folder / "no.html").exists()) == (4, False)
        yield (
            folder,
            service.get("/runs/broken/alerts")["items"],
            service.get("/runs/broken/verdict"),
        )


def opened(browser, path):
    """A page of a file, all its requests but the first, and what it complained of."""
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    page = context.new_page()
    asked, complaints = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(path.as_uri())
    page.wait_for_function(
        "() => [...document.querySelectorAll('[data-figure]')].every((n) => n.dataset.drawn)"
    )
    outside = [url for url in asked[1:] if not url.startswith(("data:", "blob:"))]
    return page, outside, complaints


@pytest.mark.skipif(find_chromium() is None, reason=HOW_TO_INSTALL)
def test_it_opens_from_the_disk_and_asks_for_nothing(written, browser):
    folder, alerts, verdict = written
    page, outside, complaints = opened(browser, folder / "broken.html")
    assert outside == []
    assert complaints == []
    [alert] = [a for a in alerts if a["kind"].startswith("desync")]
    text = page.inner_text("#headline")
    assert "Critical problem" in text
    assert alert["title"] in text
    card = page.locator(f"#alert-{alert['id']}")
    for said in (alert["remedy"], alert["tensors"][0], "rank 17", "Evidence"):
        assert said in card.inner_text()
    assert not re.search(r"\d\.\d{10}", card.locator(".evidence").inner_text())
    # Of a desync the chart is of the ranks' bits; of a loss its curve.
    assert card.locator(".plot[data-drawn]").count() == 1
    assert "rank 17" in card.locator(".plot").get_attribute("aria-label")
    heading = page.get_by_role("heading", name="loss", exact=True)
    loss = page.locator("section[aria-label=Curves] .chart", has=heading).locator(".plot")
    # 400 steps in buckets of two.
    assert "loss of 64 ranks, steps 0 to 398" in loss.get_attribute("aria-label")
    assert page.locator("#checks tr[data-state]").count() == len(verdict["checks"])
    assert page.locator("#ranks tbody tr").count() == RANKS
    page.close()


@pytest.mark.skipif(find_chromium() is None, reason=HOW_TO_INSTALL)
def test_markup_in_names_stays_text(written, browser):
    folder, _, _ = written
    page, outside, complaints = opened(browser, folder / "markup.html")
    assert (outside, complaints) == ([], [])
    assert "<img src=x" in page.inner_text("main")
    assert page.locator('img[src="x"]').count() == 0
    assert page.evaluate("document.title") != "xss"
    page.close()


def test_64_ranks_are_less_than_3_mb_and_name_no_address(written):
    folder, _, _ = written
    text = (folder / "broken.html").read_text(encoding="utf-8")
    assert len(text.encode()) < 3_000_000
    assert not re.search(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=.?https?:", text)


def test_a_figure_cannot_end_its_script():
    hostile = {"data": [], "layout": {"title": "</script><b>", "meta": {"summary": "<b>s"}}}
    run = {
        **dict.fromkeys(("id", "project", "state", "started_at", "last_seen_at"), "x"),
        "ranks": [],
        "rank_status": [],
        "world_size": 1,
        "last_step": -1,
    }
    text = render(
        Report(
            run=run,
            verdict={"verdict": "pass", "reasons": [], "checks": [], "not_seen": None},
            headline=Headline("ok", "No problems found", "<i>title"),
            alerts=[],
            charts=[Chart("<u>chart", hostile)],
            configuration=[("key", "<s>value")],
            made="now",
        )
    )
    assert "</script><b>" not in text
    for markup in ("<b>s", "<i>title", "<u>chart", "<s>value"):
        assert markup not in text
