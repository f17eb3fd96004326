"""A page never reads as fine over what was not checked, nor says two things; in Chromium."""

from dataclasses import replace

import httpx
import pytest

from rankscope.agent.wire import codec
from tests.support.runs.fixture_run import SyntheticRun, post, wait_until_evaluated
from tests.support.servers.browser import HOW_TO_INSTALL, find_chromium, watched_page
from tests.support.servers.service import Service, eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_chromium() is None, reason=HOW_TO_INSTALL),
]

# Three of its 16 ranks end at step 79, the others at step 39: what they were given was used up.
PART = SyntheticRun(run="part", ranks=16, steps=80)
FEW, HALF = 3, 40
# One loss that is not finite, and hundreds that are, after it.
RECOVERED = SyntheticRun(run="recovered", ranks=4, steps=300, nan=(1, 60))
# Its ranks end without a word; heartbeats are expected so often that this is noticed soon.
LOST = SyntheticRun(run="lost", ranks=2, steps=60, state="running")
HEARTBEAT_S = 0.2


def send(server: str, batch) -> None:
    headers = {"Content-Type": codec.CONTENT_TYPE}
    answer = httpx.post(f"{server}/api/v1/ingest", content=codec.encode(batch), headers=headers)
    answer.raise_for_status()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        for batch in PART.batches(size=40):
            if batch.rank < FEW:
                send(service.url, batch)
            elif batch.through_step < HALF:
                send(service.url, replace(batch, state="finished"))
        post(service.url, RECOVERED)
        for batch in LOST.batches(size=60):
            hello = replace(batch.hello, heartbeat_seconds=HEARTBEAT_S)
            send(service.url, replace(batch, hello=hello))
        wait_until_evaluated(service.url, RECOVERED, 300)
        yield service


@pytest.fixture
def open_page(browser, server):
    with watched_page(browser, server.url, height=2000) as watched:

        def open_page(run):
            watched.page.goto(f"/runs/{run}")
            watched.page.wait_for_selector("#headline:not([aria-busy])")
            return watched.page

        yield open_page
        watched.complaints = [said for said in watched.complaints if "404" not in said]
        watched.assert_clean()


def facts_of(server, run):
    """Checks by kind, and root alerts."""
    checks = server.get(f"/runs/{run}/verdict")["checks"]
    return {one["name"]: one for one in checks}, server.get(f"/runs/{run}/alerts")["items"]


def test_what_a_part_of_the_ranks_agreed_on_is_no_pass(open_page, server):
    eventually(lambda: server.run("part")["evaluated_step"] >= 79, timeout_s=200)
    checks, _ = facts_of(server, "part")
    check = checks["desync.parameters"]
    assert check["state"] == "not_run"
    said = f"Only {FEW} of 16 ranks were compared at 40 of 80 checked steps"
    assert said in check["why"]
    assert server.get("/runs/part/verdict")["verdict"] != "pass"
    page = open_page("part")
    headline = page.locator("#headline")
    assert "is-ok" not in headline.get_attribute("class")
    assert "No problems found" not in headline.inner_text()
    assert "agreed bit for bit" not in headline.inner_text()
    assert said in page.locator("#checks").text_content()


def test_a_lost_run_s_headline_and_its_check_say_the_same(open_page, server):
    eventually(
        lambda: server.run("lost")["state"] == "lost" and facts_of(server, "lost")[1],
        timeout_s=200,
    )
    checks, [alert] = facts_of(server, "lost")
    assert (alert["kind"], alert["state"]) == ("rank.silent", "open")
    assert checks["rank.silent"]["state"] == "failed"
    page = open_page("lost")
    title = page.inner_text("#headline h1")
    assert title == alert["title"] == "Ranks 0 and 1 have all gone silent, last complete step 59"
    assert checks["rank.silent"]["why"] == title
    assert page.locator('#facts .badge:has-text("lost")').count() == 1
    assert "No problems found" not in page.inner_text("#headline")


def test_what_is_over_does_not_read_as_going_on(open_page, server):
    _, [alert] = facts_of(server, "recovered")
    assert (alert["severity"], alert["state"]) == ("critical", "resolved")
    text = open_page("recovered").inner_text("#headline")
    # It fails the run, for what it has done, and is no problem of now.
    assert "Nothing open, but the run does not pass" in text
    assert "Critical problem" not in text
    assert f"(over, last seen at step {alert['last_step']})" in text
