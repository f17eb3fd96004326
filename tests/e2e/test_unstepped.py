"""A loop that computes gradients and never steps: real processes, at default settings."""

from pathlib import Path

import pytest

from tests.support.jobs.ranks import forked_job
from tests.support.servers.service import Service, eventually

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).parents[1] / "support" / "jobs" / "unstepped_job.py"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        yield service


def started(service, tmp_path, how):
    run = how.replace(" ", "-")
    environment = {"RANKSCOPE_SERVER": service.url, "RANKSCOPE_RUN": run, "OMP_NUM_THREADS": "1"}
    return run, forked_job(SCRIPT, how, ranks=1, folder=tmp_path, environment=environment)


def test_a_job_that_ended_without_a_step_is_no_silent_pass(service, tmp_path):
    run, job = started(service, tmp_path, "no step")
    with job:
        eventually(lambda: service.run(run), timeout_s=60)
        # A slow process may be found out before it ends.
        (alert,) = eventually(
            lambda: [a for a in service.alerts(run) if a["evidence"]["ended"]], timeout_s=60
        )
        assert len(service.alerts(run)) == 1
    assert (alert["kind"], alert["severity"]) == ("update.missing", "critical")
    assert alert["title"] == "No optimizer step was made in 30 backward passes"
    assert alert["evidence"] == {"passes": 30, "discarded": 29, "ended": True}
    assert service.get(f"/runs/{run}/verdict")["verdict"] == "fail"


def test_a_job_that_ended_long_after_its_last_step_is_no_silent_pass(service, tmp_path):
    run, job = started(service, tmp_path, "no more")
    with job:
        eventually(lambda: service.run(run), timeout_s=60)
        (alert,) = eventually(lambda: service.alerts(run), timeout_s=60)
    assert (alert["kind"], alert["severity"]) == ("update.missing", "critical")
    assert alert["title"] == "No optimizer step has ended since step 39 in 60 backward passes"


def test_a_loop_that_changes_the_parameters_itself_is_no_fault(service, tmp_path):
    run, job = started(service, tmp_path, "by hand")
    with job:
        eventually(lambda: service.run(run), timeout_s=60)
        (alert,) = eventually(
            lambda: service.get(f"/runs/{run}/alerts", limit=100)["items"], timeout_s=60
        )
    assert (alert["kind"], alert["severity"]) == ("update.missing", "info")
    assert "something else than an optimizer" in alert["title"]


def test_a_job_that_does_not_step_is_found_while_it_runs(service, tmp_path):
    run, job = started(service, tmp_path, "no step yet")
    with job as process:
        eventually(lambda: service.run(run), timeout_s=60)
        (alert,) = eventually(lambda: service.alerts(run), timeout_s=60)
        assert process.running
    assert alert["kind"] == "update.missing"
    assert alert["title"].startswith("No optimizer step has ended in ")
    assert alert["evidence"]["discarded"] >= alert["evidence"]["passes"] - 1
    assert not alert["evidence"]["ended"]


@pytest.mark.parametrize("how", ["accumulates", "fails"])
def test_a_long_accumulation_and_an_early_end_say_nothing_of_it(service, tmp_path, how):
    run, job = started(service, tmp_path, how)
    with job:
        state = {"accumulates": "finished", "fails": "failed"}[how]
        service.wait_for_state(run, state, timeout_s=90)
    verdict = eventually(
        lambda: (v := service.get(f"/runs/{run}/verdict"))["evaluated"] and v,
        timeout_s=30,
    )
    (check,) = (c for c in verdict["checks"] if c["name"] == "update.missing")
    assert check["state"] != "failed", check
    assert "update.missing" not in {alert["kind"] for alert in service.alerts(run)}
