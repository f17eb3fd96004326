"""Ranks sample steps of their own choice: what the samples of some of them show, and what not."""

from dataclasses import replace

import numpy as np
import pytest

from rankscope.server.detectors.desync.detector import Desync
from rankscope.server.window import TensorDifference
from tests.support.judging import judge
from tests.support.runs.compared import Unwrapped, differing, equal, of_ranks, run
from tests.support.runs.replicas import apart
from tests.support.runs.traces import Trace

# ------------------------------------------------------------------------------------- the chain


def test_ranks_that_agree_without_the_one_that_differed_show_nothing():
    made = apart(0, fault="step-skipped", at=40)
    samples = tuple(
        of_ranks(c, 0, 1, 3) if c.step > 40 and c.step % 3 else c for c in made.comparisons
    )
    (alert,) = judge(replace(made, comparisons=samples), [Desync()]).alerts
    assert (alert.ranks, alert.first_step, alert.state) == ((2,), 40, "open")
    assert alert.tensors


def test_who_differs_is_reported_again_once_all_have_sampled():
    made = apart(0, fault="subgroups", at=40)
    samples = tuple(of_ranks(c, 0, 1, 2) if 40 <= c.step < 48 else c for c in made.comparisons)
    early = judge(replace(made, comparisons=tuple(c for c in samples if c.step < 48)), [Desync()])
    late = judge(replace(made, comparisons=samples), [Desync()])
    (before,), (after,) = early.alerts, late.alerts
    assert before.id == after.id
    assert (before.ranks, after.ranks) == ((2,), (0, 1, 2, 3))
    assert after.evidence["groups"] == [[0, 1], [2, 3]]
    assert not after.evidence["decided"]


def test_of_two_that_sampled_first_the_parameters_show_which_one_is_wrong():
    made = apart(0, fault="skipped", at=40)
    samples = [
        of_ranks(c, 0, 2) if c.stage == "reduced_gradient" else c
        for c in made.comparisons
        if c.step >= 46 or c.stage == "reduced_gradient"
    ]
    early = judge(replace(made, comparisons=tuple(c for c in samples if c.step < 46)), [Desync()])
    late = judge(replace(made, comparisons=tuple(samples)), [Desync()])
    (before,), (after,) = early.alerts, late.alerts
    assert before.id == after.id
    assert (before.ranks, before.first_step) == ((0, 2), 40)
    assert (after.ranks, after.first_step, after.kind) == ((2,), 40, "desync.gradients")
    assert after.evidence["decided"]


@pytest.mark.parametrize("gradients_at", [1, 8])
def test_a_state_is_said_to_be_first_only_where_gradients_were_watched(gradients_at):
    """A gradient that is wrong at one step between two samples leaves a state that differs."""
    stages = ("reduced_gradient", "optimizer_state", "parameters")
    samples = [
        differing(step, stage, [0, 0, 1, 0])
        if step >= 40 and stage != "reduced_gradient"
        else equal(step, stage)
        for step in range(64)
        for stage in stages
        if step % (gradients_at if stage == "reduced_gradient" else 8) == 0
    ]
    (alert,) = judge(run(samples, steps=64), [Desync()]).alerts
    assert (alert.kind, alert.first_step, alert.ranks) == ("desync.optimizer", 40, (2,))
    assert "gradients agreed" in alert.cause
    said = "not compared at every step since step 32: one that was wrong" in alert.cause
    assert said == (gradients_at == 8)


@pytest.mark.parametrize(("count", "severity"), [(2, "critical"), (7, "info")])
def test_ranks_that_differ_in_a_few_tensors_from_the_start_do_not_go_their_own_ways(
    count, severity
):
    tensors = [TensorDifference(f"w{i}", (4, 4), (1,), 0.1, 0.1, 7) for i in range(count)]
    samples = [
        differing(step, stage, [0, 1], tensors, of=8)
        for step in range(40)
        for stage in ("reduced_gradient", "parameters")
    ]
    (alert,) = judge(run(samples, ranks=2, kind=Unwrapped), [Desync()]).alerts
    assert (alert.kind, alert.severity) == ("desync.gradients", severity)


def test_a_loss_scale_of_its_own_is_the_cause_of_another_gradient():
    samples = [equal(step, "hyperparameters") for step in range(30)]
    for step in range(30, 60):
        for stage in ("clipped_gradient", "hyperparameters", "parameters"):
            samples.append(differing(step, stage, [0, 0, 1, 0]))
    scales = np.full((4, 60), 65536.0)
    scales[2, 30:] /= 2
    (alert,) = judge(run(samples, amp_scale=scales), [Desync()]).alerts
    assert (alert.kind, alert.stage) == ("desync.hyperparameters", "hyperparameters")
    assert (alert.ranks, alert.first_step, alert.severity) == ((2,), 30, "critical")
    assert "loss scale differs" in alert.title
    assert "weighted unequally" in alert.cause
    assert alert.evidence["values"]["2"] == 32768.0


def test_a_learning_rate_of_its_own_comes_after_the_gradient_in_the_chain():
    stages = ("clipped_gradient", "hyperparameters", "parameters")
    samples = [differing(step, s, [0, 0, 1, 0]) for step in range(30, 60) for s in stages]
    rates = np.full((4, 60), 0.1)
    rates[2, 30:] /= 2
    (alert,) = judge(run(samples, lr=rates, amp_scale=np.full((4, 60), 8.0)), [Desync()]).alerts
    assert (alert.kind, alert.stage) == ("desync.gradients", "clipped_gradient")


def test_what_a_rank_loads_at_a_restart_is_dated_by_the_checkpoint():
    """Steps 32 to 36 are trained again after it, and were judged before."""
    samples = [equal(step, "parameters") for step in range(37)]
    samples += [differing(step, "parameters", [0, 0, 1, 0]) for step in range(37, 60)]
    before, after = run(samples).windows((37,))
    after = replace(
        after,
        comparisons=(differing(32, "start", [0, 0, 1, 0]), *after.comparisons),
        begins=dict.fromkeys(range(4), (0, 32)),
    )
    detector = Desync()
    state = detector.start()
    assert detector.advance(before, state).findings == ()
    (finding,) = detector.advance(after, state).findings
    assert (finding.kind, finding.stage, finding.first_step) == ("desync.parameters", "start", 32)
    assert (finding.ranks, finding.last_step, finding.severity) == ((2,), 59, "critical")
    assert finding.evidence["agreed_until"] is None


class Halves(Trace):
    """Two ranks that hold different halves of a model."""

    def windows(self, cuts=()):
        for window in super().windows(cuts):
            yield replace(window, config={"data_parallel": ""}, classes=((0,), (1,)))


def test_what_ranks_with_different_parts_both_hold_is_said_to_be_compared():
    tensors = [TensorDifference("norm", (4,), (1,), 0.1, 0.1, 4)]
    good = [equal(step, "reduced_gradient", 2) for step in range(20)]
    check = judge(run(good, ranks=2, kind=Halves), [Desync()]).checks["desync.gradients"]
    assert check.status == "ok"
    assert "Of ranks 0 and 1, only tensors that other ranks hold" in check.why
    bad = [differing(step, "reduced_gradient", [0, 1], tensors, of=4) for step in range(20, 60)]
    (alert,) = judge(run([*good, *bad], ranks=2, kind=Halves), [Desync()]).alerts
    assert (alert.severity, alert.first_step, alert.tensors) == ("critical", 20, ("norm",))


# --------------------------------------------------------------------- settings and the state


def test_a_momentum_of_its_own_comes_before_the_state_that_it_makes():
    """A setting other than the rate goes into the state of the same step."""
    stages = ("optimizer_state", "hyperparameters", "parameters")
    samples = [equal(step, stage) for step in range(30) for stage in stages]
    samples += [differing(step, s, [0, 0, 1, 0]) for step in range(30, 60) for s in stages]
    given = np.full((4, 60), np.nan)
    given[:, 0], given[2, 30] = 0.9, 0.5
    made = run(samples, lr=np.full((4, 60), 0.1), **{"hyperparameters/0/momentum": given})
    (alert,) = judge(made, [Desync()]).alerts
    assert (alert.kind, alert.stage) == ("desync.hyperparameters", "hyperparameters")
    assert (alert.ranks, alert.first_step) == ((2,), 30)
    assert alert.title == (
        "Rank 2's momentum differs from the other ranks' since step 30 (0.5 instead of 0.9)"
    )
    assert "learning rate" not in alert.cause
    assert alert.evidence["values"] == {"0": 0.9, "1": 0.9, "2": 0.5, "3": 0.9}


def test_a_state_that_was_restored_with_its_rate_is_a_matter_of_the_state():
    stages = ("optimizer_state", "hyperparameters", "parameters")
    samples = [differing(step, s, [0, 0, 1, 0]) for step in range(30, 60) for s in stages]
    rates = np.full((4, 60), 0.1)
    rates[2, 30:] = 0.2
    (alert,) = judge(run(samples, lr=rates), [Desync()]).alerts
    assert (alert.kind, alert.stage) == ("desync.optimizer", "optimizer_state")


def test_a_setting_of_a_further_group_is_named():
    """Of further groups, only what differs from the first is posted when the run begins."""
    samples = [differing(step, "hyperparameters", [0, 1, 0]) for step in range(30, 60)]
    first, second = np.full((3, 60), np.nan), np.full((3, 60), np.nan)
    first[:, 0], second[1, 30] = 0.1, 0.4
    made = run(
        samples,
        ranks=3,
        **{"hyperparameters/0/weight_decay": first, "hyperparameters/1/weight_decay": second},
    )
    (alert,) = judge(made, [Desync()]).alerts
    assert alert.title.endswith(
        "weight decay differs from the other ranks' since step 30 (0.4 instead of 0.1)"
    )


def test_of_two_ranks_with_different_betas_both_values_are_reported():
    samples = [differing(step, "hyperparameters", [0, 1]) for step in range(30, 60)]
    given = np.full((2, 60), np.nan)
    given[:, 0], given[1, 30] = 0.9, 0.8
    made = run(samples, ranks=2, **{"hyperparameters/0/betas.0": given})
    (alert,) = judge(made, [Desync()]).alerts
    assert alert.title == (
        "Ranks 0 and 1 have different values of beta1 since step 30 (0.8 and 0.9)"
    )
