"""Inputs of which what distinguishes them is lost in what they have in common."""

import numpy as np
import pytest

from rankscope.server.detectors.data.unscaled import Unscaled
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 60


def alerts(*spreads):
    """Of ranks whose batches scatter by so much of their size; one odd batch among them."""
    values = np.tile(np.array(spreads)[:, None], STEPS)
    values[0, 2] = 0.3
    series = {"input_spread": values}
    return judge(Trace("alike", 0, np.arange(STEPS), series), [Unscaled()]).alerts


def test_samples_that_scatter_by_a_thousandth_are_told_from_the_start():
    (alert,) = alerts(0.0014, 0.0015)
    assert (alert.kind, alert.key, alert.severity) == ("data.unscaled", "spread", "warning")
    assert (alert.first_step, alert.seen_step) == (0, 3)
    assert "lost beside it" in alert.cause


@pytest.mark.parametrize(
    "spreads",
    [
        (0.05, 0.05),  # features with an offset of twenty deviations
        (0.0014, 0.4),  # one rank alone reads such batches: `data.outlier`
        (0.0, 0.0),  # the same to the last bit: another fault
    ],
)
def test_else_nothing_is_said(spreads):
    assert not [a for a in alerts(*spreads) if a.key == "spread"]


def sized(*sizes, worth=0.0, steps=140):
    """Of ranks whose first layer is given inputs of these sizes."""
    series = {
        "first_layer_input_rms": np.tile(np.array(sizes)[:, None], steps),
        "explained_deviance": np.full((len(sizes), steps), worth),
    }
    return judge(Trace("sized", 0, np.arange(steps), series), [Unscaled()]).alerts


def test_inputs_that_are_nothing_but_zeros_are_told_where_nothing_is_learned():
    (alert,) = sized(0.0, 0.0)
    assert (alert.kind, alert.severity, alert.first_step) == ("data.unscaled", "warning", 0)
    assert alert.seen_step == 100
    assert "nothing but zeros" in alert.title


@pytest.mark.parametrize(
    ("sizes", "more"),
    [
        ((0.0, 1.0), {}),  # one rank alone: `data.outlier`
        ((0.0, 0.0), {"worth": 0.4}),  # a branch that begins at zero beside others
        ((0.0, 0.0), {"steps": 90}),  # too soon to know
    ],
)
def test_zeros_that_do_no_harm_are_not(sizes, more):
    assert sized(*sizes, **more) == ()
