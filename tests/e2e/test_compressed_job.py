"""Real jobs that compress their gradients by hand: what a rank counts in the result."""

from pathlib import Path

import pytest

from tests.support.jobs.judged_job import judged_job

JOB = Path(__file__).parents[1] / "support" / "jobs" / "compressed_job.py"


@pytest.mark.e2e
def test_a_rank_that_is_added_twice_is_named(tmp_path):
    """From step 60 on; every step is sampled, so that a change shows within some of them."""
    found = judged_job(
        JOB, "twice", "140", ranks=3, folder=tmp_path, environment={"RANKSCOPE_ALLOWANCE": "inf"}
    ).alerts["reduction.wrong"]
    assert (found.key, found.ranks) == ("shares", [1])
    assert 56 <= found.first_step <= 68


@pytest.mark.e2e
def test_ranks_that_count_alike_are_not(tmp_path):
    judged = judged_job(
        JOB, "healthy", "140", ranks=3, folder=tmp_path, environment={"RANKSCOPE_ALLOWANCE": "inf"}
    )
    assert "reduction.wrong" not in judged.alerts
    assert judged.checks["reduction.wrong"].status == "not_applicable"
