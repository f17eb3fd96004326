"""How a job ended: the rank that failed first, of what and where, in the alert and in the gate."""

import subprocess
from pathlib import Path

import pytest

from rankscope.server.demo.processes import RANKSCOPE
from tests.support.jobs.ranks import finished, forked_job, started_ranks
from tests.support.servers.service import Service, eventually

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).parents[1] / "support" / "jobs" / "unhappy_job.py"
STEP = 20


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        yield service


def ended(service, tmp_path, how, ranks):
    """Name, alerts (consequences too) and verdict of a run that ended badly."""
    run = how.replace(" ", "-")
    environment = {"RANKSCOPE_SERVER": service.url, "RANKSCOPE_RUN": run, "OMP_NUM_THREADS": "1"}
    lost = "killed" in how
    # How an interpreter ends is part of it, where it comes to that.
    start = forked_job if lost else started_ranks
    with start(
        SCRIPT, how, str(STEP), ranks=ranks, folder=tmp_path, environment=environment
    ) as job:
        done = finished(job)
    assert all(done.exit_codes)
    service.wait_for_state(run, "lost" if lost else "failed", timeout_s=120)

    def reported():
        path = f"/runs/{run}/alerts"
        items = service.get(path, limit=100, consequences=True)["items"]
        return [alert for alert in items if alert["kind"] in ("rank.failed", "rank.silent")]

    return run, eventually(reported, timeout_s=60)


def printed(service, *command):
    done = subprocess.run(
        [*RANKSCOPE, *command, "--server", service.url], capture_output=True, text=True, timeout=60
    )
    # Lines are broken to fit a terminal.
    return done.returncode, " ".join(done.stdout.split())


def test_the_rank_that_raised_first_is_named_and_the_others_follow(service, tmp_path):
    run, (alert,) = ended(service, tmp_path, "raises", 3)
    assert (alert["kind"], alert["severity"], alert["ranks"]) == ("rank.failed", "critical", [2])
    assert alert["title"] == f"Rank 2 failed in step {STEP}: ValueError: label 12 is out of range"
    assert f"in step {STEP} at go_wrong (unhappy_job.py:" in alert["cause"]
    assert alert["first_step"] == STEP
    assert alert["evidence"]["failed_ranks"][0] == 2
    code, gate = printed(service, "gate", run)
    assert code == 1
    assert f"rank.failed critical (open) {alert['title']}" in gate
    code, listed = printed(service, "alerts", run)
    assert code == 0
    assert f"CRITICAL rank.failed (open): {alert['title']}" in listed


def test_an_exit_with_another_code_is_a_failure(service, tmp_path):
    _, (alert,) = ended(service, tmp_path, "all exits", 1)
    assert (alert["kind"], alert["severity"], alert["ranks"]) == ("rank.failed", "warning", [0])
    assert alert["title"] == f"Rank 0 failed in step {STEP}: SystemExit: 3"


def test_a_job_that_was_killed_as_a_whole(service, tmp_path):
    run, (alert,) = ended(service, tmp_path, "all killed", 2)
    assert (alert["kind"], alert["ranks"]) == ("rank.silent", [0, 1])
    assert "the job was killed" in alert["cause"]
    code, gate = printed(service, "gate", run)
    assert code == 1
    assert alert["title"] in gate


@pytest.mark.parametrize("how", ["all asked to end", "all interrupted"])
def test_a_stop_from_outside_is_a_state_and_no_fault(service, tmp_path, how):
    run, (alert,) = ended(service, tmp_path, how, 1)
    assert (alert["kind"], alert["severity"]) == ("rank.failed", "info")
    code, gate = printed(service, "gate", run)
    assert code == 1
    assert alert["title"] in gate
