"""Real jobs that train well in ways that look like a fault, and the faults that they look like."""

from pathlib import Path

import pytest

from tests.support.jobs import healthy_jobs
from tests.support.jobs.healthy_jobs import AT
from tests.support.jobs.judged_job import judged_job

pytestmark = pytest.mark.e2e

SCRIPT = Path(healthy_jobs.__file__)


def judged(name, steps, folder):
    return judged_job(SCRIPT, name, str(steps), ranks=2, folder=folder)


def test_a_bias_of_zeros_of_which_each_rank_owns_a_slice(tmp_path):
    job = judged("column-bias", 100, tmp_path)
    assert not job.alerts
    assert job.checks["desync.gradients"].status == "ok"


def test_one_that_all_ranks_hold_is_compared(tmp_path):
    alert = judged("row-bias-fault", 100, tmp_path).alerts["desync.gradients"]
    assert (alert.first_step, alert.tensors) == (AT, ["3.bias"])


@pytest.mark.jobs
def test_an_autoencoder_that_leaves_most_units_unused(tmp_path):
    job = judged("autoencoder", 250, tmp_path)
    assert {kind for kind, alert in job.alerts.items() if alert.severity != "info"} == set()
    alert = job.alerts["layer.dead"]
    assert max(alert.evidence["shares"].values()) > 0.5
    assert "is no worse for it" in alert.cause


@pytest.mark.jobs
@pytest.mark.parametrize(("name", "steps"), [("vanishing", 60), ("converged", 250)])
def test_gradients_of_which_rounding_is_left(tmp_path, name, steps):
    job = judged(name, steps, tmp_path)
    assert "reduction.wrong" not in job.alerts
    assert job.checks["reduction.wrong"].status == "ok"


@pytest.mark.jobs
@pytest.mark.parametrize(("name", "steps"), [("mixed", 500), ("mixed-long", 420)])
def test_samples_that_are_mixed_and_restarts_of_the_rate(tmp_path, name, steps):
    job = judged(name, steps, tmp_path)
    assert not {"accuracy.stalled", "loss.plateau"} & job.alerts.keys()
    assert job.checks["accuracy.stalled"].status == "ok"
    # Half of the targets have nearly no share in it.
    accuracies = [value for value in job.collector.points("accuracy").values() if value == value]
    assert sum(accuracies) / len(accuracies) > 0.7


@pytest.mark.jobs
def test_a_seed_that_nothing_comes_of(tmp_path):
    job = judged("loader", 100, tmp_path)
    assert "rng.shared" not in job.alerts
    assert job.checks["rng.shared"].status == "ok"


@pytest.mark.jobs
@pytest.mark.parametrize("name", ["loader-dropout", "loader-workers"])
def test_one_from_which_dropout_draws_or_the_seeds_of_workers(tmp_path, name):
    alert = judged(name, 100, tmp_path).alerts["rng.shared"]
    assert (alert.severity, alert.evidence["generator"]) == ("info", "rng/torch")
