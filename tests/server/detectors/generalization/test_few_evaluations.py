"""An evaluation of a short job, of which there are four."""

import numpy as np
import pytest

from rankscope.server.detectors.generalization.gap import GeneralizationGap
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS, EVERY = 160, 40


def alerts(*evaluated, falls=True):
    """Of a job that evaluates every 40 steps, and whose loss falls from 2.5 to 1.2."""
    at = np.arange(STEPS)
    random = np.random.default_rng(0)
    held = (at % EVERY == EVERY - 1)[None, :].repeat(2, axis=0)
    course = 1.1 + 1.4 * np.exp(-at / 60) if falls else np.full(STEPS, 1.2)
    series = {
        "loss": course * np.exp(0.03 * random.standard_normal((2, STEPS))),
        "eval/loss": np.repeat(evaluated, EVERY)[None, :].repeat(2, axis=0),
        "target_deviance": np.full((2, STEPS), 4.0),
    }
    trace = Trace("evaluated", 0, at, series, present={"eval/loss": held})
    return judge(trace, [GeneralizationGap()]).alerts


def test_each_is_worse_than_the_one_before():
    (alert,) = alerts(2.86, 3.0, 3.23, 3.39)
    assert (alert.kind, alert.severity, alert.first_step) == ("generalization.gap", "warning", 39)
    assert alert.evidence["rise"] == pytest.approx(0.185, abs=0.005)


@pytest.mark.parametrize(
    "evaluated",
    [
        (2.86, 3.0, 2.9, 3.39),  # not each
        (2.9, 2.86, 3.0, 3.39),  # two since the best
        (2.86, 2.87, 2.88, 2.89),  # by next to nothing
        (3.4, 3.2, 3.0, 2.9),
    ],
)
def test_four_that_say_nothing(evaluated):
    assert alerts(*evaluated) == ()


def test_training_that_does_not_fall():
    assert alerts(2.86, 3.0, 3.23, 3.39, falls=False) == ()
