"""Real jobs with faults that no comparison of trained replicas shows, at default settings."""

from pathlib import Path

import pytest

from tests.support.jobs import unseen_jobs
from tests.support.jobs.judged_job import judged_job
from tests.support.jobs.unseen_jobs import AT, SUSPECT

pytestmark = pytest.mark.e2e

SCRIPT = Path(unseen_jobs.__file__)


def judged(name, folder, *, ranks=3, steps=140, **environment):
    return judged_job(SCRIPT, name, str(steps), ranks=ranks, folder=folder, environment=environment)


def serious(job):
    return {kind for kind, alert in job.alerts.items() if alert.severity != "info"}


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("frozen-bit", "base.2.weight"), ("teacher-bit", "teacher.0.weight")],
)
def test_a_frozen_weight_that_changes_on_one_rank_is_named(tmp_path, name, tensor):
    job = judged(name, tmp_path)
    assert serious(job) == {"desync.parameters"}
    alert = job.alerts["desync.parameters"]
    assert (alert.ranks, alert.tensors) == ([SUSPECT], [tensor])
    assert (alert.first_step, alert.stage) == (AT, "outside_optimizer")
    assert "A single element" in alert.cause


def test_one_that_changes_everywhere_is_information(tmp_path):
    job = judged("frozen-everywhere", tmp_path)
    assert not serious(job)
    alert = job.alerts["update.frozen"]
    assert (alert.ranks, alert.tensors) == ([0, 1, 2], ["base.2.weight"])
    assert alert.first_step == AT


@pytest.mark.parametrize("name", ["teacher", "target"])
def test_teachers_and_target_networks_are_healthy(tmp_path, name):
    job = judged(name, tmp_path)
    assert not serious(job)
    assert "update.frozen" not in job.alerts
    assert job.checks["desync.parameters"].status == "ok"


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("shard-bit", "head.0.weight"), ("frozen-shard-bit", "base.2.weight")],
)
def test_a_bit_of_one_shard_is_named_without_a_replica(tmp_path, name, tensor):
    job = judged(name, tmp_path)
    assert serious(job) == {"desync.parameters"}
    alert = job.alerts["desync.parameters"]
    assert (alert.ranks, alert.tensors) == ([SUSPECT], [tensor])
    assert (alert.first_step, alert.stage) == (AT, "outside_optimizer")


@pytest.mark.jobs
def test_shards_that_are_all_written_are_no_fault(tmp_path):
    assert not serious(judged("shards-everywhere", tmp_path))


@pytest.mark.parametrize(("name", "times"), [("scaled-nan", 5), ("guarded-nan", 3)])
def test_a_gradient_for_which_steps_are_skipped_is_its_ranks(tmp_path, name, times):
    job = judged(name, tmp_path)
    assert serious(job) == {"gradient.nonfinite"}
    alert = job.alerts["gradient.nonfinite"]
    assert (alert.ranks, alert.tensors) == ([SUSPECT], ["head.0.weight"])
    assert alert.evidence["times"] >= times
    assert alert.evidence["finite_on"] == [0, 2]


def test_the_first_one_is_information(tmp_path):
    job = judged("guarded-nan-once", tmp_path)
    alert = job.alerts["gradient.nonfinite"]
    assert (alert.severity, alert.ranks, alert.first_step) == ("info", [SUSPECT], AT)
    assert alert.tensors == ["head.0.weight"]
    assert not serious(job)


@pytest.mark.parametrize(("ranks", "allowance"), [(3, "10"), (2, "10"), (3, "0")])
def test_an_older_state_on_one_rank_is_its_optimizers_state(tmp_path, ranks, allowance):
    job = judged("older-state", tmp_path, ranks=ranks, RANKSCOPE_ALLOWANCE=allowance)
    assert "desync.optimizer" in serious(job)
    alert = job.alerts["desync.optimizer"]
    assert (alert.ranks, alert.first_step) == ([SUSPECT], AT)
    assert "went from 61 to 30" in alert.cause
    assert "update.reset" not in job.alerts


@pytest.mark.parametrize(
    ("name", "how"),
    [("older-state-everywhere", "set back"), ("new-optimizer-everywhere", "reset")],
)
def test_a_state_that_is_changed_everywhere_is_information(tmp_path, name, how):
    job = judged(name, tmp_path)
    assert not serious(job)
    alert = job.alerts["update.reset"]
    assert (alert.ranks, alert.first_step) == ([0, 1, 2], AT)
    assert alert.evidence["how"] == how
