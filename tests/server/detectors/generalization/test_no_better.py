"""An evaluation that is no better than a constant answer, while training is solved."""

import numpy as np
import pytest

from rankscope.agent.wire import NO_SAMPLE, SAMPLE_DIGESTS
from rankscope.server.detectors.generalization.gap import GeneralizationGap
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS, EVERY, CONSTANT = 300, 50, 2.3


def alerts(training, evaluated, *, constant=CONSTANT, steps=STEPS, name="eval/loss", also=()):
    """Of a job that evaluates every 50 steps.

    Args:
        training, evaluated: loss, as a function of the step.
        also: names under which the same is posted as well.
    """
    at = np.arange(steps)
    random = np.random.default_rng(0)
    noise = np.exp(0.1 * random.standard_normal((2, steps)))
    held = (at % EVERY == EVERY - 1)[None, :].repeat(2, axis=0)
    series = {
        "loss": np.array([training(step) for step in at]) * noise,
        name: np.array([evaluated(step) for step in at])[None, :].repeat(2, axis=0),
        "target_deviance": np.full((2, steps), constant),
    }
    series |= dict.fromkeys(also, series[name])
    trace = Trace("evaluated", 0, at, series, present=dict.fromkeys((name, *also), held))
    return judge(trace, [GeneralizationGap()]).alerts


def solved(step):
    return max(2.3 * 0.95**step, 0.01)


def test_what_is_of_no_use_in_the_evaluation_is_found_with_its_first_evaluation():
    [alert] = alerts(solved, lambda step: 17.0 + 0.01 * step)
    assert (alert.kind, alert.severity, alert.first_step) == ("generalization.gap", "warning", 49)
    assert alert.seen_step == 149
    assert "no better than a constant answer" in alert.title


@pytest.mark.parametrize(
    ("training", "evaluated"),
    [
        (solved, lambda step: 1.9),  # better than that
        (lambda step: 2.29, lambda step: 2.31),  # nothing is learned: another kind's matter
        (solved, lambda step: 5.0 if step < 100 else 0.1),  # the first two alone
    ],
)
def test_else_nothing_is_said(training, evaluated):
    assert [a for a in alerts(training, evaluated) if "constant" in a.title] == []


def test_where_it_was_learned_before_it_is_a_rise():
    found = alerts(solved, lambda step: 0.5 if step < 200 else 0.5 + 0.01 * (step - 200), steps=900)
    assert [a.title.startswith("The evaluation") for a in found] == [False]


def test_one_that_is_hardly_better_than_a_constant_is_none():
    [alert] = alerts(solved, lambda step: 2.15)
    assert (alert.severity, alert.first_step, alert.seen_step) == ("warning", 49, 149)


def memorised(step):
    return 2.3 * (1 - 5e-4 * step)


def test_what_is_memorised_however_slowly():
    [alert] = alerts(memorised, lambda step: 2.32 + 2e-4 * step, steps=600)
    assert (alert.severity, alert.first_step) == ("warning", 49)
    assert alert.title.endswith("training memorises")
    assert "shuffled separately" in alert.cause


@pytest.mark.parametrize(
    "evaluated",
    [
        lambda step: 2.32 - 2e-4 * step,  # it comes down with the training
        lambda step: 2.28 if step < 60 else 2.35,  # one was better
        lambda step: 2.5 - 2e-4 * step,  # other targets: worse, and not for good
        lambda step: 2.35,  # an average of the weights that has not been updated yet
    ],
)
def test_an_evaluation_that_follows_is_none(evaluated):
    assert alerts(memorised, evaluated, steps=600) == ()


@pytest.mark.parametrize("name", ["val_loss", "valid/loss", "testLoss"])
def test_what_a_user_logs_is_judged_where_the_agent_sees_no_evaluation(name):
    [alert] = alerts(solved, lambda step: 2.5 + 0.001 * step, name=name)
    assert alert.evidence["evaluation"]
    assert "no better than a constant answer" in alert.title


def test_where_it_sees_one_that_alone_is():
    [alert] = alerts(solved, lambda step: 2.5 + 0.001 * step, also=("val_loss",))
    assert alert.evidence["evaluation"] == ""


@pytest.mark.parametrize("cuts", [(), (100,), (100, 101, 270)])
def test_what_is_logged_before_the_agent_sees_one_ends_there(cuts):
    at = np.arange(STEPS)
    series = {
        "loss": np.tile([solved(step) for step in at], (2, 1)),
        "val_loss": np.tile(2.5 + 0.001 * at, (2, 1)),
        "eval/loss": np.full((2, STEPS), 0.02),
        "target_deviance": np.full((2, STEPS), CONSTANT),
    }
    present = {
        "val_loss": np.tile(at % 20 == 19, (2, 1)),
        "eval/loss": np.tile(at == 259, (2, 1)),
    }
    trace = Trace("both", 0, at, series, present=present)
    [alert] = judge(trace, [GeneralizationGap()], cuts).alerts
    assert (alert.state, alert.evidence["evaluation"]) == ("resolved", "val")


def test_a_value_that_is_logged_at_every_step_is_one_evaluation_each():
    at = np.arange(400)
    random = np.random.default_rng(0)
    values = np.repeat(0.97 ** np.arange(10) * np.exp(0.12 * random.standard_normal(10)), 40)
    series = {
        "loss": np.tile(np.maximum(0.98**at, 0.01), (2, 1)),
        "val_loss": np.tile(values, (2, 1)),
    }
    trace = Trace("forward", 0, at, series)
    once = Trace("once", 0, at, series, present={"val_loss": np.tile(at % 40 == 0, (2, 1))})
    found = [judge(job, [GeneralizationGap()]).alerts for job in (trace, once)]
    assert [len(alerts) for alerts in found] == [0, 0]


@pytest.mark.parametrize("name", ["val_kl_loss", "val/aux_loss", "valid_loss_tokens", "value_loss"])
def test_other_names_are_no_evaluations(name):
    assert alerts(solved, lambda step: 2.5 + 0.02 * step, name=name) == ()


def test_what_changes_at_every_step_is_no_evaluation():
    at = np.arange(STEPS)
    random = np.random.default_rng(0)
    series = {
        "loss": np.tile([solved(step) for step in at], (2, 1)),
        "val_loss": np.tile(1 + 0.02 * at + random.random(STEPS), (2, 1)),
    }
    assert judge(Trace("value", 0, at, series), [GeneralizationGap()]).alerts == ()


@pytest.mark.parametrize(
    "evaluated",
    [
        lambda step: 40 + 0.001 * step,  # a sum over batches
        lambda step: 5.0 if step < 60 else 2.5,  # of another unit: it has come down
    ],
)
def test_of_what_is_logged_the_unit_is_not_known(evaluated):
    found = alerts(solved, evaluated, name="val_loss")
    assert [a for a in found if "constant" in a.title] == []


def test_a_rise_of_what_is_logged_is_one():
    found = alerts(
        solved, lambda step: 0.5 + 0.002 * max(step - 100, 0), name="val_loss", steps=900
    )
    assert [a.title.startswith("The loss of the evaluation") for a in found] == [True]


def test_samples_that_came_often_may_be_memorised():
    at = np.arange(STEPS)
    held = np.tile(at % EVERY == EVERY - 1, (2, 1))
    series = {
        "loss": np.tile([solved(step) for step in at], (2, 1)),
        "eval/loss": np.full((2, STEPS), 17.0),
        "target_deviance": np.full((2, STEPS), CONSTANT),
    }
    few = np.tile(at % 4 + 1, (2, 1)).astype(np.uint64)
    words = {SAMPLE_DIGESTS[0]: few << np.uint64(32) | np.uint64(NO_SAMPLE)}
    trace = Trace("few", 0, at, series, present={"eval/loss": held}, words=words)
    [alert] = judge(trace, [GeneralizationGap()]).alerts
    assert "each sample of training has come 150 times" in alert.cause
    assert alert.remedy.startswith("Train on more samples")
