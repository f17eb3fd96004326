"""Real jobs with one fault each, from the trainer's step to the verdict."""

from pathlib import Path

import pytest

from rankscope.agent.tripwires import SAMPLES
from tests.support.jobs import small_jobs
from tests.support.jobs.judged_job import judged_job

pytestmark = pytest.mark.e2e

SCRIPT = Path(small_jobs.__file__)
# Of a trend over 200 steps each has to be there, however busy the machine is.
EVERY_STEP = {"RANKSCOPE_ALLOWANCE": "inf"}


def test_a_loss_that_does_not_depend_on_the_parameters_is_an_alert(tmp_path):
    job = judged_job(SCRIPT, "one-class", "120", ranks=2, folder=tmp_path)
    (kind,) = job.alerts
    assert kind == "gradient.vanishing"
    alert = job.alerts[kind]
    assert (alert.severity, alert.first_step) == ("critical", 0)
    assert "over one class" in alert.cause
    assert "No step changed any parameter" in alert.cause
    passed = {kind for kind, check in job.checks.items() if check.status == "ok"}
    # What rests on a loss, a gradient or an update that moves.
    blind = {"loss.diverging", "loss.plateau", "lr.too_low", "reduction.wrong", "layer.dead"}
    assert not passed & (blind | {"gradient.accumulating", "rank.loss_outlier", "update.missing"})


def test_a_training_that_has_nothing_left_to_learn_is_healthy(tmp_path):
    job = judged_job(SCRIPT, "learned", "200", ranks=1, folder=tmp_path)
    assert not [a.kind for a in job.alerts.values() if a.severity != "info"]
    assert job.collector.points("grad_norm")[0] > 0
    assert 0 in list(job.collector.points("loss").values())[-20:]


def test_epochs_in_one_order_are_seen_although_few_steps_are_sampled(tmp_path):
    # A fifth of the default share: a busy machine stretches steps, of which more are sampled then.
    sparse = {"RANKSCOPE_ALLOWANCE": "0", "RANKSCOPE_OVERHEAD": "0.002"}
    job = judged_job(SCRIPT, "in-one-order", "120", ranks=2, folder=tmp_path, environment=sparse)
    assert job.alerts["data.unshuffled"].first_step == small_jobs.EPOCH
    # The tier that all of a model's digests belong to was due at a few of them.
    assert len(job.words("parameters")) < 60 < len(job.words("batch"))


def test_epochs_in_one_order_are_seen_although_each_batch_is_augmented(tmp_path):
    job = judged_job(SCRIPT, "in-one-order-augmented", "120", ranks=2, folder=tmp_path)
    alert = job.alerts["data.unshuffled"]
    assert alert.first_step == small_jobs.EPOCH
    assert "labels" in alert.cause
    assert len(set(job.words("batch").values())) == len(job.words("batch"))


def test_shuffled_epochs_are_not(tmp_path):
    job = judged_job(SCRIPT, "shuffled-augmented", "120", ranks=2, folder=tmp_path)
    assert not {kind for kind in job.alerts if kind.startswith("data.")}
    assert job.checks["data.unshuffled"].status == "ok"


@pytest.mark.parametrize(("name", "severity"), [("one-batch", "warning"), ("whole-data", "info")])
def test_one_batch_for_ever_is_seen_and_a_data_set_in_one_batch_is_no_fault(
    tmp_path, name, severity
):
    job = judged_job(SCRIPT, name, "140", ranks=1, folder=tmp_path)
    alert = job.alerts["data.unshuffled"]
    assert (alert.severity, alert.first_step, alert.ranks) == (severity, 0, [0])
    assert [a.kind for a in job.alerts.values() if a.severity != "info"] == (
        ["data.unshuffled"] if severity == "warning" else []
    )


def test_a_loss_that_is_divided_by_a_large_number_teaches_nothing(tmp_path):
    job = judged_job(SCRIPT, "divided", "130", ranks=1, folder=tmp_path)
    alert = job.alerts["lr.too_low"]
    assert (alert.severity, alert.first_step) == ("warning", 0)
    assert alert.evidence["update_ratio"] < 1e-5


def test_a_rank_that_reads_what_another_has_read_before_is_seen(tmp_path):
    job = judged_job(SCRIPT, "late", "120", ranks=2, folder=tmp_path)
    assert job.alerts["data.overlap"].severity == "warning"


@pytest.mark.parametrize("allowance", [None, "0"])
def test_a_short_job_is_seen_whole_by_default(tmp_path, allowance):
    given = {} if allowance is None else {"RANKSCOPE_ALLOWANCE": allowance}
    job = judged_job(
        SCRIPT, "shuffled-augmented", "120", ranks=2, folder=tmp_path, environment=given
    )
    reported = job.collector.points("rankscope/sampled")
    for rank in range(2):
        posted = [b.prints for b in job.collector.batches if b.rank == rank]
        steps = {p.step for prints in posted for p in prints if p.stage == "local_gradient"}
        if allowance is None:
            assert steps == set(range(120))
        else:
            assert len(steps) < 100
    assert (reported[119] == 1.0) is (allowance is None)


def test_a_nan_that_one_rank_puts_into_the_reduction_is_named_between_samples(tmp_path):
    # Steps of a millisecond bear a canary at a larger share of their time only.
    given = {"RANKSCOPE_ALLOWANCE": "0", "RANKSCOPE_OVERHEAD": "0.2"}
    job = judged_job(SCRIPT, "poisoned", "100", ranks=2, folder=tmp_path, environment=given)
    alert = job.alerts["gradient.nonfinite"]
    assert (alert.ranks, alert.tensors) == ([1], ["bias"])
    assert alert.first_step == small_jobs.POISONED
    assert "loss.nonfinite" not in job.alerts  # it follows from it


def test_a_loss_far_from_those_before_it_has_the_next_steps_sampled(tmp_path):
    given = {"RANKSCOPE_ALLOWANCE": "0"}
    # Steps are so even that a slow one may well have tripped before: that must not mask this.
    job = judged_job(SCRIPT, "jumping", "100", ranks=2, folder=tmp_path, environment=given)
    trips = [
        (batch.rank, event.step, event.data["metric"])
        for batch in job.collector.batches
        for event in batch.events
        if event.kind == "tripwire" and event.data["metric"] != "step_seconds"
    ]
    assert (1, small_jobs.POISONED, "loss") in trips
    posted = [b.prints for b in job.collector.batches if b.rank == 1]
    steps = {p.step for prints in posted for p in prints if p.stage == "local_gradient"}
    first = small_jobs.POISONED + 1
    assert steps >= set(range(first, first + SAMPLES))


def test_a_rank_that_keeps_a_term_of_each_step_with_its_graph_is_named(tmp_path):
    job = judged_job(SCRIPT, "memory-leak", "200", ranks=2, folder=tmp_path, environment=EVERY_STEP)
    alert = job.alerts["memory.growing"]
    assert alert.ranks == [1]
    # Its graph holds two tensors of the size of the scores: 4 MB on average.
    assert 2e6 < alert.evidence["bytes_per_step"] < 8e6
    assert alert.evidence["series"] == "process_resident_memory_bytes"
    assert alert.evidence["limit_bytes"] > alert.evidence["bytes"]
    assert alert.first_step < 100


@pytest.mark.jobs
def test_memory_that_batches_and_evaluations_come_and_go_with_is_healthy(tmp_path):
    job = judged_job(SCRIPT, "memory", "200", ranks=2, folder=tmp_path, environment=EVERY_STEP)
    assert "memory.growing" not in job.alerts
    assert job.checks["memory.growing"].status == "ok"
    resident = job.collector.points("process_resident_memory_bytes")
    assert max(resident.values()) > min(resident.values()) > 5e7
