"""A job that hangs: real ranks that wait in real collectives, and who is said to hold them up."""

from pathlib import Path

import httpx
import pytest

from tests.support.jobs.ranks import forked_job
from tests.support.servers.service import Service, eventually

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).parents[1] / "support" / "jobs" / "unhappy_job.py"
STEP = 20


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        # A person has two minutes of patience, a test has not.
        sooner = {"detectors": {"rank.stalled": {"elsewhere": 12, "typical_steps": 0}}}
        httpx.put(
            f"{service.url}/api/v1/projects/default/detectors", json=sooner
        ).raise_for_status()
        yield service


def hung(service, tmp_path, how, ranks=2):
    """The alert of a job that hangs while it does."""
    run = how.replace(" ", "-")
    environment = {"RANKSCOPE_SERVER": service.url, "RANKSCOPE_RUN": run, "OMP_NUM_THREADS": "1"}
    with forked_job(
        SCRIPT, how, str(STEP), ranks=ranks, folder=tmp_path, environment=environment
    ) as job:
        eventually(lambda: service.run(run), timeout_s=90)
        (alert,) = eventually(lambda: service.alerts(run), timeout_s=90)
        assert job.running
        verdict = service.get(f"/runs/{run}/verdict")
    return alert, {check["name"]: check for check in verdict["checks"]}


@pytest.mark.parametrize(
    ("how", "step", "does"),
    [
        ("loader", STEP, "loading data at stand_still (unhappy_job.py:"),
        ("first step", 0, "in the user's code at stand_still (unhappy_job.py:"),
        ("evaluation", STEP, "in the user's code at stand_still (unhappy_job.py:"),
    ],
)
def test_a_rank_that_stands_still_is_named_and_where_it_is(service, tmp_path, how, step, does):
    alert, checks = hung(service, tmp_path, how)
    assert (alert["kind"], alert["ranks"], alert["first_step"]) == ("rank.stalled", [1], step)
    assert alert["title"].startswith(f"Rank 0 waits in step {step} for rank 1, which is {does}")
    assert "rank 0 is in the backward pass at main (unhappy_job.py:" in alert["cause"]
    assert alert["evidence"]["waiting"] == [0]
    stacks = alert["evidence"]["stacks"]
    assert stacks.keys() == {"0", "1"}
    assert any(
        line.startswith("stand_still (unhappy_job.py:") for line in stacks["1"]["MainThread"]
    )
    assert any("_engine_run_backward" in line for line in stacks["0"]["MainThread"])
    assert checks["rank.stalled"]["state"] == "failed"


def test_a_rank_that_is_done_before_the_others(service, tmp_path):
    alert, _ = hung(service, tmp_path, "done", ranks=3)
    assert (alert["kind"], alert["ranks"]) == ("rank.stalled", [2])
    assert alert["title"] == f"Ranks 0 and 1 wait in step {STEP} for rank 2, which is done"


def test_a_job_that_dies_in_different_collectives(service, tmp_path):
    environment = {"RANKSCOPE_SERVER": service.url, "RANKSCOPE_RUN": "gave-up"}
    with forked_job(
        *(SCRIPT, "other collective", str(STEP)), ranks=3, folder=tmp_path, environment=environment
    ) as job:
        # Until gloo gives up: its time-out ends every rank.
        assert all(job.wait(120))
    (alert,) = eventually(
        lambda: [a for a in service.alerts("gave-up") if a["kind"] == "rank.stalled"], timeout_s=60
    )
    assert (alert["ranks"], alert["first_step"]) == ([2], STEP)
    assert "rank 2, which is in a collective at go_wrong (unhappy_job.py:" in alert["title"]
    assert "rank 2 is in gloo:broadcast" in alert["cause"]
    assert "ranks 0 and 1 are in gloo:all_reduce" in alert["cause"]
    of_rank = alert["evidence"]["collectives"]
    assert of_rank.keys() == {"0", "2"}
    mine, theirs = of_rank["2"][-1], of_rank["0"][-1]
    # The same number, of the same group: both began it after the same ones, and not the same.
    assert (mine["name"], theirs["name"]) == ("gloo:broadcast", "gloo:all_reduce")
    assert (mine["sequence"], mine["group"]) == (theirs["sequence"], theirs["group"])
    assert (mine["state"], mine["shapes"]) == ("scheduled", [[3]])
    assert all(one["state"] == "completed" for one in of_rank["2"][:-1])
    assert any("go_wrong" in line for line in alert["evidence"]["stacks"]["2"]["MainThread"])
