"""Real jobs in which one parameter group has a learning rate of its own."""

from pathlib import Path

import pytest

from tests.support.jobs import group_jobs
from tests.support.jobs.judged_job import judged_job

pytestmark = pytest.mark.e2e

SCRIPT = Path(group_jobs.__file__)


def judged(folder, which, times):
    return judged_job(SCRIPT, which, times, ranks=1, folder=folder)


def serious(job):
    return {kind for kind, alert in job.alerts.items() if alert.severity != "info"}


@pytest.mark.parametrize(
    ("which", "tensor", "since"),
    [
        ("first", "0.weight", 0),
        ("middle", "2.weight", 0),
        ("head", "4.weight", 0),
        ("added", "4.weight", group_jobs.ADDED),
    ],
)
def test_a_group_that_learns_300_times_as_fast_is_named(tmp_path, which, tensor, since):
    job = judged(tmp_path, which, "300")
    alert = job.alerts["update.ratio"]
    assert (alert.severity, alert.tensors, alert.first_step) == ("warning", [tensor], since)
    rates = alert.evidence["lr_of_groups"]
    assert (rates["0"], rates["1"]) == pytest.approx((1e-3, 0.3), rel=1e-3)
    assert alert.evidence["grown"] > 4


@pytest.mark.parametrize(("which", "times"), [("head", "10"), ("head", "1"), ("first", "0.01")])
def test_usual_rates_of_groups_are_no_fault(tmp_path, which, times):
    job = judged(tmp_path, which, times)
    assert not serious(job)
    assert job.checks["update.ratio"].status == "ok"
