"""What is said of ranks that differ, from the first difference to agreement."""

from dataclasses import replace

import numpy as np
import pytest

from rankscope.server.detectors import build
from rankscope.server.detectors.desync.detector import Desync
from rankscope.server.detectors.desync.incident import Growth
from rankscope.server.window import Comparison, Series, TensorDifference, Window
from tests.support.judging import judge
from tests.support.runs.chain import chain
from tests.support.runs.replicas import apart
from tests.support.runs.traces import Trace


def test_the_alert_says_more_once_more_is_known():
    """Digest only at step 40, tensors at step 64: one alert that is updated."""
    made = apart(0, fault="skipped", prints_every=64)
    early = judge(
        replace(
            made,
            steps=made.steps[:50],
            series={name: values[:, :50] for name, values in made.series.items()},
            comparisons=tuple(c for c in made.comparisons if c.step < 50),
        ),
        [Desync()],
    )
    late = judge(made, [Desync()])
    (before,), (after,) = early.alerts, late.alerts
    assert before.id == after.id
    assert (before.tensors, after.tensors) == ((), ("hidden.weight",))
    assert "not known yet" in before.cause
    assert "not known yet" not in after.cause


def test_agreement_resolves_after_eight_steps_and_the_next_desync_is_another():
    made = apart(0, fault="bitflip", at=40, repaired_at=50)
    again = apart(0, fault="bitflip", at=80, rank=1)
    both = tuple(c for c in made.comparisons if c.step < 70) + tuple(
        c for c in again.comparisons if c.step >= 70
    )
    found = judge(replace(made, comparisons=both), [Desync()])
    assert [(a.ranks, a.first_step, a.last_step, a.state) for a in found.alerts] == [
        ((2,), 40, 49, "resolved"),
        ((1,), 80, 119, "open"),
    ]


def test_ranks_that_agree_for_a_moment_only_still_differ():
    made = apart(0, fault="bitflip", at=40, repaired_at=50)
    again = apart(0, fault="bitflip", at=54)
    both = tuple(c for c in made.comparisons if c.step < 54) + tuple(
        c for c in again.comparisons if c.step >= 54
    )
    (alert,) = judge(replace(made, comparisons=both), [Desync()]).alerts
    assert (alert.first_step, alert.state) == (40, "open")


def test_without_digests_of_parameters_the_broken_link_itself_is_the_witness():
    made = apart(0, fault="skipped")
    only = tuple(c for c in made.comparisons if c.stage == "reduced_gradient")
    (alert,) = judge(replace(made, comparisons=only), [Desync()]).alerts
    assert (alert.kind, alert.last_step, alert.state) == ("desync.gradients", 40, "resolved")


def test_digests_without_sketches_name_tensors_but_no_size():
    def without(c):
        if not c.tensors:
            return c
        nan = np.where(c.clusters == 0, 0.0, np.nan)
        tensors = tuple(replace(t, distance=np.nan, relative=np.nan, buckets=0) for t in c.tensors)
        return replace(c, distance=nan, relative=nan, tensors=tensors)

    made = apart(0, fault="step-skipped")
    bare = tuple(without(c) for c in made.comparisons if c.stage == "parameters")
    (alert,) = judge(replace(made, comparisons=bare), [Desync()]).alerts
    assert alert.tensors == ("embed.weight", *alert.tensors[1:])
    assert (alert.severity, alert.evidence["sizes"]) == ("warning", [])
    assert "nothing before them was compared there" in alert.cause


def test_where_digests_are_rare_the_onset_is_said_to_be_uncertain():
    made = apart(0, fault="step-skipped", words_every=8, at=42)
    (alert,) = judge(made, [Desync()]).alerts
    assert alert.first_step == 48
    assert "equal at step 40" in alert.cause


def test_gradients_that_were_not_sampled_are_not_said_to_agree():
    made = apart(0, fault="step-skipped", at=48)
    only = tuple(c for c in made.comparisons if c.stage == "parameters")
    (alert,) = judge(replace(made, comparisons=only), [Desync()]).alerts
    assert "gradients were not sampled at this step" in alert.cause
    (alert,) = judge(made, [Desync()]).alerts  # all tensors were examined, and not the norm alone
    assert "the gradient after the all-reduce" in alert.cause
    assert "the norm of" not in alert.cause
    assert "not sampled" not in alert.cause


@pytest.mark.parametrize(
    ("stage", "severity"),
    [
        ("start", "critical"),
        ("reduced_gradient", "critical"),
        ("hyperparameters", "critical"),
        ("outside_optimizer", "warning"),
        ("parameters", "warning"),
    ],
)
def test_a_small_difference_is_critical_where_it_grows(stage, severity):
    ranks, labels = np.arange(3), np.array([0, 0, 1])
    apart_by = np.array([0.0, 0.0, 1e-5])
    tensor = TensorDifference("w", (4, 4), (2,), 1e-5, 1e-5, buckets=7)
    made = Trace(
        "small",
        0,
        np.arange(3),
        {"loss": np.ones((3, 3))},
        comparisons=(Comparison(1, stage, ranks, labels, apart_by, apart_by, True, (tensor,), 2),),
    )
    (alert,) = judge(made, [Desync()]).alerts
    assert (alert.severity, alert.ranks) == (severity, (2,))


class Unwrapped(Trace):
    """A run that nothing is known to keep equal: no wrapper reduces its gradients."""

    def windows(self, cuts=()):
        for window in super().windows(cuts):
            yield replace(window, config={"data_parallel": ""})


@pytest.mark.parametrize(("differing", "severity"), [(8, "info"), (2, "critical")])
def test_ranks_that_learn_for_themselves_differ_in_all_tensors(differing, severity):
    # A distance that stays in bounds between rare samples may be that of local SGD.
    ranks, labels = np.arange(2), np.array([0, 1])
    steps = [*range(9), *range(64, 260, 4)]
    distance = [0.01 * (s + 1) if s < 9 else 0.09 + 0.0003 * s for s in steps]
    tensors = tuple(
        TensorDifference(f"w{i}", (4, 4), (1,), 0.1, 0.1, buckets=7) for i in range(differing)
    )
    comparisons = tuple(
        Comparison(step, stage, ranks, labels, *2 * (np.array([0.0, d]),), False, tensors, 8)
        for step, d in zip(steps, distance, strict=True)
        for stage in ("reduced_gradient", "parameters")
    )
    made = Unwrapped("own", 0, np.arange(260), {"loss": np.ones((2, 260))}, comparisons=comparisons)
    (alert,) = judge(made, [Desync()]).alerts
    assert alert.evidence["growth"] == Growth.GROWING
    assert (alert.kind, alert.severity, alert.ranks) == ("desync.gradients", severity, (0, 1))


ALONE = "The ranks train alone: the model is not wrapped, gradients are not reduced"


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("cuts", [(), range(0, 300, 7)], ids=("whole", "blocks"))
def test_ranks_that_train_alone_are_called_so_once_it_is_certain(ranks, cuts):
    (early,) = judge(chain(1, fault="alone", ranks=ranks, steps=120), [Desync()], cuts).alerts
    assert (early.severity, early.title == ALONE) == ("info", False)
    (late,) = judge(chain(1, fault="alone", ranks=ranks, steps=200), [Desync()], cuts).alerts
    assert (late.severity, late.title, late.id) == ("critical", ALONE, early.id)
    assert "monitor.replicas(None)" in late.remedy


@pytest.mark.parametrize(
    ("fault", "at"), [("alone-averaged", 64), ("alone-averaged", 100), ("alone-shared", 40)]
)
def test_ranks_that_exchange_something_are_not_alone(fault, at):
    for ranks in (2, 4):
        if fault == "alone-shared" and ranks == 2:
            continue  # what two ranks share, all of them do
        found = judge(chain(1, fault=fault, at=at, ranks=ranks, steps=300), [Desync()])
        assert {a.severity for a in found.alerts} == {"info"}
        assert ALONE not in {a.title for a in found.alerts}


def test_clipping_on_one_rank_only():
    made = apart(0, fault="skipped")
    clipped = tuple(
        replace(c, stage="clipped_gradient")
        for c in made.comparisons
        if c.stage == "reduced_gradient"
    )
    (alert,) = judge(replace(made, comparisons=clipped), [Desync()]).alerts
    assert (alert.kind, alert.stage) == ("desync.gradients", "clipped_gradient")
    assert "agreed before clipping" in alert.cause


def test_a_synchronisation_that_no_longer_takes_place_is_missed():
    made = apart(0, synchronised_every=4, steps=60)
    stopped = apart(0, fault="bypassed", at=0, steps=120)
    both = (
        tuple(c for c in made.comparisons if c.step < 47)
        + tuple(c for c in stopped.comparisons if c.step >= 47 and c.stage != "parameters")
        + tuple(c for c in stopped.comparisons if c.stage == "parameters" and c.step >= 56)
    )
    both = tuple(sorted(both, key=lambda c: c.step))
    found = judge(replace(stopped, comparisons=both), [Desync()])
    assert [(a.key, a.state) for a in found.alerts] == [
        ("", "resolved"),
        ("synchronised", "resolved"),
        ("missed", "open"),
    ]


def test_ranks_that_are_equal_all_the_time_after_all():
    made = apart(0, synchronised_every=4, steps=60)
    equal = apart(0, steps=120)
    both = tuple(c for c in made.comparisons if c.step < 48) + tuple(
        c for c in equal.comparisons if c.step >= 48
    )
    found = judge(replace(equal, comparisons=both), [Desync()])
    assert [a.state for a in found.alerts] == ["resolved", "resolved"]
    assert found.checks["desync.parameters"].status == "ok"


def test_equality_at_odd_intervals_is_no_synchronisation():
    ranks, none = np.arange(3), np.zeros(3, dtype=np.int64)
    one = np.array([0, 0, 1])
    nan = np.array([0, 0, np.nan])
    returns = {10, 13, 20, 24, 37, 38}
    comparisons = tuple(
        Comparison(step, "parameters", ranks, none, 0.0 * none, 0.0 * none)
        if step in returns
        else Comparison(step, "parameters", ranks, one, nan, nan)
        for step in range(60)
    )
    made = Trace("odd", 0, np.arange(60), {"loss": np.ones((3, 60))}, comparisons=comparisons)
    (alert,) = judge(made, [Desync()]).alerts
    assert (alert.first_step, alert.state, alert.ranks) == (0, "open", (2,))


@pytest.mark.parametrize(
    ("course", "growth"),
    [
        (lambda t: 0 * t + 0.3, Growth.CONSTANT),
        (lambda t: 0.3 * (1 - 0.9**t), Growth.CONSTANT),
        (lambda t: 0.1 * t, Growth.GROWING),
        (lambda t: 0.1 * np.sqrt(t), Growth.GROWING),
        (lambda t: 1e-6 * np.exp(0.1 * t), Growth.EXPONENTIAL),
        (lambda t: 3.0 / t, Growth.SHRINKING),
    ],
)
@pytest.mark.parametrize("every", [1, 4])
def test_how_the_distance_grows(course, growth, every):
    def run(steps):
        ranks, labels = np.arange(3), np.array([0, 0, 1])
        distances = course(np.arange(1.0, steps + 1))
        comparisons = tuple(
            Comparison(
                step,
                "parameters",
                ranks,
                labels,
                np.array([0.0, 0.0, distances[step]]),
                np.array([0.0, 0.0, distances[step]]),
                tensor_count=4,
            )
            for step in range(0, steps, every)
        )
        loss = {"loss": np.ones((3, steps))}
        return Trace("growth", 0, np.arange(steps), loss, comparisons=comparisons)

    (alert,) = judge(run(200), [Desync()]).alerts
    assert alert.evidence["growth"] == growth
    assert len(alert.evidence["sizes"]) <= 64
    (early,) = judge(run(6), [Desync()]).alerts
    assert early.evidence["growth"] == Growth.UNKNOWN


def test_a_rank_that_is_missing_in_a_comparison_is_no_desync():
    made = apart(0)
    alone = tuple(
        replace(
            c,
            ranks=c.ranks[:1],
            clusters=c.clusters[:1],
            distance=c.distance[:1],
            relative=c.relative[:1],
        )
        for c in made.comparisons
    )
    found = judge(replace(made, comparisons=alone), [Desync()])
    assert found.alerts == ()
    assert found.checks["desync.parameters"].status == "missing_input"


def test_local_buffers_hide_no_desync():
    alone = judge(apart(0, fault="skipped"), build())
    beside = judge(apart(0, fault="skipped", buffers="own"), build())

    def found(judgement):
        return [
            (a.kind, a.severity, a.ranks, a.first_step, a.parent)
            for a in judgement.alerts
            if a.kind != "desync.buffers"
        ]

    assert found(alone) == found(beside)
    assert {a.kind for a in beside.alerts} - {a.kind for a in alone.alerts} == {"desync.buffers"}


def differing(stage, *, agreed=(), tensors=(), lr=None):
    """Three ranks that differ at step 5 in one link, and agree in others."""
    ranks, zeros = np.arange(3), np.zeros(3)
    labels = np.array([0, 0, 1])
    comparisons = [Comparison(5, name, ranks, np.zeros(3, int), zeros, zeros) for name in agreed]
    unknown = np.array([0, 0, np.nan])
    comparisons.append(
        Comparison(5, stage, ranks, labels, unknown, unknown, tensors=tensors, tensor_count=4)
    )
    rates = np.full((3, 1), 0.1) if lr is None else np.array(lr)[:, None]
    window = Window(
        world_size=3,
        ranks=ranks,
        steps=np.array([5]),
        series={"lr": Series(rates, np.ones((3, 1), bool))},
        comparisons=tuple(comparisons),
        last_step=5,
    )
    detector = Desync()
    [finding] = detector.advance(window, detector.start()).findings
    return finding


def test_a_state_that_differs_while_gradients_were_not_sampled():
    tensors = tuple(
        TensorDifference("w", (4,), (2,), 0.1, 0.1, buckets=3, table=f"optimizer/{name}")
        for name in ("exp_avg", "exp_avg_sq")
    )
    unsampled = differing("optimizer_state", tensors=tensors)
    assert "gradients agreed" not in unsampled.cause
    assert "were not sampled" in unsampled.cause
    assert "2 of 4 tensors differ at step 5: exp_avg of w and exp_avg_sq of w." in unsampled.cause
    assert unsampled.tensors == ("w",)
    assert unsampled.title.endswith("(w)")
    sampled = differing("optimizer_state", agreed=("reduced_gradient",))
    assert "gradients agreed" in sampled.cause


def test_a_setting_that_is_not_the_learning_rate_is_not_called_so():
    other = differing("hyperparameters")
    assert other.title == "Rank 2's optimizer settings differ from the other ranks' since step 5"
    assert "learning rate" not in other.cause
    rate = differing("hyperparameters", lr=[0.1, 0.1, 0.2])
    assert rate.title.endswith("(0.2 instead of 0.1)")
