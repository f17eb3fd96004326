"""Real ranks that resume, with the state of their optimizers and without."""

from pathlib import Path

import pytest

from tests.support.jobs import resumed_job
from tests.support.jobs.judged_job import judged_job

pytestmark = pytest.mark.e2e

SCRIPT = Path(resumed_job.__file__)


@pytest.mark.parametrize("restored", ["all", "weights"])
def test_a_rank_that_resumes_with_its_weights_alone_is_named(tmp_path, restored):
    job = judged_job(SCRIPT, restored, ranks=2, folder=tmp_path)
    grave = {kind: alert for kind, alert in job.alerts.items() if alert.severity != "info"}
    if restored == "all":
        assert not grave
        return
    (alert,) = grave.values()
    assert (alert.kind, alert.severity, alert.ranks) == ("desync.optimizer", "critical", [1])
    assert (alert.first_step, alert.stage) == (resumed_job.BEFORE, "start")
    assert "the optimizer's state was not loaded" in alert.cause
