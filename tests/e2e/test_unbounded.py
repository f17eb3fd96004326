"""Real jobs whose loss goes below 0: by a mistake, or by its nature."""

from pathlib import Path

import pytest

from tests.support.jobs import unbounded_jobs
from tests.support.jobs.judged_job import judged_job

pytestmark = [pytest.mark.e2e, pytest.mark.jobs]

SCRIPT = Path(unbounded_jobs.__file__)


def judged(folder, name):
    return judged_job(SCRIPT, name, ranks=1, folder=folder)


def serious(job):
    return {kind for kind, alert in job.alerts.items() if alert.severity != "info"}


@pytest.mark.parametrize("name", ["ranking-sign", "error-sign", "scores"])
def test_a_loss_without_a_least_value_diverges_downwards(tmp_path, name):
    job = judged(tmp_path, name)
    assert job.alerts["loss.diverging"].severity == "critical"
    assert ("loss.mismatch" in job.alerts) is (name == "error-sign")


def test_the_negative_of_an_error_is_named_at_once(tmp_path):
    alert = judged(tmp_path, "error-sign").alerts["loss.mismatch"]
    assert (alert.severity, alert.first_step) == ("warning", 0)
    assert "negative of an error" in alert.title


def test_probabilities_without_their_logarithm_are_no_argument_of_a_divergence(tmp_path):
    alert = judged(tmp_path, "kl-probabilities").alerts["loss.mismatch"]
    assert (alert.severity, alert.first_step) == ("warning", 0)
    assert "kl_div" in alert.title


@pytest.mark.parametrize("name", ["ranking", "error", "kl", "density", "policy", "critic"])
def test_losses_that_are_negative_by_their_nature_are_healthy(tmp_path, name):
    job = judged(tmp_path, name)
    assert not serious(job)
    assert job.checks["loss.diverging"].status == "ok"
