"""Real jobs of two ranks whose data contradict each other, or are unlike."""

from pathlib import Path

import pytest

from tests.support.jobs.judged_job import judged_job

JOB = Path(__file__).parents[1] / "support" / "jobs" / "exchanged_job.py"
pytestmark = [pytest.mark.e2e, pytest.mark.jobs]


@pytest.mark.e2e
def test_labels_exchanged_on_one_of_two_ranks(tmp_path):
    """Their losses are alike, and so are all replicas."""
    found = judged_job(JOB, "exchanged", "500", ranks=2, folder=tmp_path).alerts
    alert = found["rank.gradient_outlier"]
    assert (alert.key, alert.severity, alert.ranks) == ("opposed", "warning", [0, 1])
    assert alert.first_step == 0
    assert alert.evidence["cosine"] < -0.15


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["alike", "classes"])
def test_ranks_with_one_task_do_not_contradict_each_other(kind, tmp_path):
    assert (
        "rank.gradient_outlier" not in judged_job(JOB, kind, "500", ranks=2, folder=tmp_path).alerts
    )
