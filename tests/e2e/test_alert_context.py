"""What is around an alert of a real job: its console, what was not committed, its settings."""

import shutil
import subprocess
from pathlib import Path

import pytest

from rankscope.client import Client
from tests.support.jobs import printing_job
from tests.support.jobs.ranks import run_ranks
from tests.support.servers.browser import HOW_TO_INSTALL, chromium, find_chromium, watched_page
from tests.support.servers.service import Service, eventually

pytestmark = pytest.mark.e2e

SCRIPT = Path(printing_job.__file__)


def git(folder, *arguments):
    named = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *named, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """A server with a run whose job has said all, and one whose job was asked for nothing."""
    folder = tmp_path_factory.mktemp("around")
    tree = folder / "tree"
    tree.mkdir()
    shutil.copy(SCRIPT, tree / "train.py")
    git(tree, "init")
    git(tree, "add", ".")
    git(tree, "commit", "-m", "first")
    with (tree / "train.py").open("a") as script:
        script.write("\n# changed by hand; WANDB_API_KEY=0123456789abcdef0123\n")
    asked = {"RANKSCOPE_CONSOLE": "40", "RANKSCOPE_GIT_DIFF": "1"}
    with Service(folder / "server") as running:
        for run, more in (("open", asked), ("closed", {})):
            run_ranks(
                tree / "train.py",
                ranks=2,
                folder=folder / run,
                environment={
                    "PYTHONPATH": str(SCRIPT.parents[3]),
                    "RANKSCOPE_SERVER": running.url,
                    "RANKSCOPE_RUN": run,
                    **more,
                },
                timeout_s=240,
            ).check()
        yield running


def around(service, run):
    with Client(service.url) as client:
        alert = eventually(
            lambda: next(iter(client.run_alerts(run, state="open")), None), timeout_s=60
        )
        return alert, client.alert_context(alert.id)


def test_what_the_ranks_printed_stands_beside_the_alert_without_secrets(service):
    alert, found = around(service, "open")
    # The last lines before it, where a value jumps, and those when the rank hears of the alert.
    assert {one.rank for one in found.console} == {0, 1}
    assert {one.rank for one in found.console if one.step >= alert.first_step} == {0, 1}
    for one in found.console:
        assert len(one.lines) <= 40
        text = "\n".join(one.lines)
        assert f"rank {one.rank} is at step " in text
        assert "WARNING:root:API_KEY=*** is what rank" in text
        assert "abcd-efgh" not in text
    diff = found.git_diff
    assert "+# changed by hand; WANDB_API_KEY=***" in diff.diff
    assert "0123456789abcdef" not in diff.diff
    assert len(diff.commit) == 40
    assert (found.settings["data.name"], found.settings["optimizer"]) == ("digits", "SGD")
    # They are no events that people read of a run.
    kinds = {event["kind"] for event in service.get("/runs/open")["events"]}
    assert not kinds & {"console", "git.diff"}


def test_nothing_is_sent_that_was_not_asked_for(service):
    _, found = around(service, "closed")
    assert (found.console, found.git_diff) == ([], None)
    assert found.settings["data.name"] == "digits"


@pytest.mark.skipif(find_chromium() is None, reason=HOW_TO_INSTALL)
def test_the_page_shows_it(service):
    alert, _ = around(service, "open")
    with chromium() as browser, watched_page(browser, service.url) as watched:
        page = watched.page
        page.goto(f"/runs/open#alert-{alert.id}")
        part = page.locator(f"#alert-{alert.id} [data-part=context]")
        part.locator("summary").first.click()
        part.get_by_text("Rank 1 had printed").last.click()
        part.get_by_text("rank 1 is at step").last.wait_for()
        part.get_by_text("Changes that were not committed").click()
        part.get_by_text("changed by hand").wait_for()
        part.locator("summary").get_by_text("Settings", exact=True).click()
        part.get_by_text("data.name").wait_for()
        watched.assert_clean()
