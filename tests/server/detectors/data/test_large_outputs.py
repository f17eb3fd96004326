"""Outputs that begin so large that the loss is many times that of a constant answer."""

import numpy as np
import pytest

from rankscope.server.detectors.data.unscaled import Unscaled
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 160


def alerts(times, *, scale=None, first=0, cuts=()):
    """Of a job whose loss is so many times that of a constant answer, as a function of the step."""
    at = np.arange(STEPS)
    noise = np.exp(0.1 * np.random.default_rng(1).standard_normal((2, STEPS)))
    series = {"explained_deviance": 1 - times(at) * noise}
    if scale is not None:
        series["output_scale"] = np.full((2, STEPS), scale)
        series["target_size"] = np.full((2, STEPS), 1.0)
    return judge(Trace("large", 0, at + first, series), [Unscaled()], cuts).alerts


def shrinks(step):
    return 130 * 0.99**step


@pytest.mark.parametrize("cuts", [(), (1, 50, 99, 100, 101)])
@pytest.mark.parametrize("scale", [None, 40.0])
def test_a_loss_that_is_spent_on_shrinking_them_is_found(scale, cuts):
    [alert] = alerts(shrinks, scale=scale, cuts=cuts)
    assert (alert.kind, alert.severity, alert.first_step) == ("weights.unscaled", "warning", 0)
    assert alert.seen_step == 100
    assert "after 100 steps it is still 4" in alert.cause


@pytest.mark.parametrize(
    ("times", "more"),
    [
        (lambda t: 130 * 0.9**t, {}),  # it comes down in time
        (lambda t: 3 * 0.999**t, {}),  # as bad as torch's own embeddings
        (lambda t: np.where(t < 3, 0.9, 130), {}),  # thrown up by a step
        (lambda t: 10 + t, {}),  # it grows: a rate that is too high
        (shrinks, {"scale": 0.01}),  # it is the targets that are large
        (shrinks, {"first": 500}),  # who goes on with other data
    ],
)
def test_else_nothing_is_said(times, more):
    assert alerts(times, **more) == ()


def test_it_is_over_when_they_are_better_than_that():
    [alert] = alerts(lambda t: np.where(t < 120, 130 * 0.99**t, 0.5))
    assert alert.state == "resolved"
