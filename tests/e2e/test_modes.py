"""Training in evaluation mode, from real jobs of three ranks to the alert."""

from pathlib import Path

import pytest

from tests.support.jobs import ddp_modes
from tests.support.jobs.ranks import run_ranks
from tests.support.servers.service import Service

pytestmark = pytest.mark.e2e

SCRIPT = Path(ddp_modes.__file__)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        yield service


def judged(service, folder, run, forget):
    """Alerts of a job, and what is said of the modes of its modules."""
    run_ranks(
        SCRIPT,
        *(service.url, run, "20", forget),
        ranks=3,
        folder=folder,
        environment={"PYTHONPATH": str(SCRIPT.parents[3])},
        timeout_s=240,
    ).check()
    service.wait_for_state(run, "finished")
    checks = service.get(f"/runs/{run}/verdict")["checks"]
    alerts = service.get(f"/runs/{run}/alerts", limit=100)["items"]
    return alerts, next(check for check in checks if check["name"] == "mode.evaluation")


def test_one_rank_that_stays_in_evaluation_mode_is_named_with_its_modules(service, tmp_path):
    alerts, check = judged(service, tmp_path, "one", "1")
    (found,) = [a for a in alerts if a["kind"] == "mode.evaluation"]
    assert (found["ranks"], found["first_step"], found["severity"]) == ([1], 20, "warning")
    assert found["title"] == "Rank 1 trains in evaluation mode since step 20"
    assert found["evidence"]["modules"] == ["1", "3"]
    assert check["state"] == "failed"
    assert set(service.series("one")[1]) == set(range(ddp_modes.STEPS))
    assert list(service.series("one", "eval/loss")[1]) == [19]


def test_all_ranks_that_stay_in_evaluation_mode(service, tmp_path):
    alerts, _ = judged(service, tmp_path, "all", "0,1,2")
    (found,) = [a for a in alerts if a["kind"] == "mode.evaluation"]
    assert (found["ranks"], found["first_step"]) == ([0, 1, 2], 20)
    assert found["title"] == "The model trains in evaluation mode since step 20"


def test_a_frozen_norm_and_an_evaluation_with_train_after_it_pass(service, tmp_path):
    alerts, check = judged(service, tmp_path, "none", "-")
    assert "mode.evaluation" not in {a["kind"] for a in alerts}
    assert check["state"] == "passed", check
    assert "compared between the ranks" in check["why"]
