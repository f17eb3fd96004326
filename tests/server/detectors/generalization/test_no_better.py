"""An evaluation that is no better than a constant answer, while training is solved."""

import numpy as np
import pytest

from rankscope.server.detectors.generalization.gap import GeneralizationGap
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS, EVERY, CONSTANT = 300, 50, 2.3


def alerts(training, evaluated, *, constant=CONSTANT, steps=STEPS):
    """Of a job that evaluates every 50 steps.

    Args:
        training, evaluated: loss, as a function of the step.
    """
    at = np.arange(steps)
    random = np.random.default_rng(0)
    noise = np.exp(0.1 * random.standard_normal((2, steps)))
    held = (at % EVERY == EVERY - 1)[None, :].repeat(2, axis=0)
    series = {
        "loss": np.array([training(step) for step in at]) * noise,
        "eval/loss": np.array([evaluated(step) for step in at])[None, :].repeat(2, axis=0),
        "target_deviance": np.full((2, steps), constant),
    }
    trace = Trace("evaluated", 0, at, series, present={"eval/loss": held})
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
