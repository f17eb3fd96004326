"""Real jobs that learn from two views of each sample, with what keeps samples apart or without."""

from pathlib import Path

import pytest

from tests.support.jobs import views_jobs
from tests.support.jobs.judged_job import judged_job

pytestmark = [pytest.mark.e2e, pytest.mark.jobs]

SCRIPT = Path(views_jobs.__file__)


@pytest.mark.parametrize(
    ("passes", "loss"),
    [("two-passes", "attracted"), ("two-passes", "stopped"), ("one-pass", "attracted")],
)
def test_views_that_only_attract_each_other_collapse(tmp_path, passes, loss):
    job = judged_job(SCRIPT, passes, loss, ranks=1, folder=tmp_path)
    alert = job.alerts["layer.dead"]
    assert alert.severity == "critical"
    assert "collapsed" in alert.title
    assert alert.evidence["output_spread"] < 0.1 < alert.evidence["output_spread_at_first"]


@pytest.mark.parametrize("passes", ["two-passes", "one-pass"])
@pytest.mark.parametrize("loss", ["contrasted", "by_hand"])
def test_views_that_are_contrasted_are_healthy(tmp_path, passes, loss):
    job = judged_job(SCRIPT, passes, loss, ranks=1, folder=tmp_path)
    assert not [kind for kind, alert in job.alerts.items() if alert.severity != "info"]
    assert job.checks["layer.dead"].status in ("ok", "open")
