"""A real pipeline, whose second stage waits for the first one."""

from pathlib import Path

import pytest

from tests.support.jobs import pipeline_job
from tests.support.jobs.judged_job import judged_job

pytestmark = pytest.mark.e2e

SCRIPT = Path(pipeline_job.__file__)


def test_a_later_stage_that_waits_for_the_one_before_is_not_starved(tmp_path):
    job = judged_job(SCRIPT, "60", ranks=2, folder=tmp_path)
    assert "rank.starved" not in job.alerts
    waited = job.collector.points("data_seconds", rank=1)
    assert sorted(waited.values())[len(waited) // 2] > pipeline_job.WAIT / 2
    assert job.collector.points("input_received", rank=1).keys() == waited.keys()
    assert not job.collector.points("input_received", rank=0)
