"""A loss that swings further than its steps can have moved it is no fault of the learning rate."""

import numpy as np
import pytest

from rankscope.server.detectors.loss.oscillating import LossOscillating
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 200


def alert(reach, period=2, cuts=(), cosine=-0.9, *, written=False):
    """Of a loss that swings by 0.3 around 2, by steps of which each can change it by `reach`."""
    rng = np.random.default_rng(0)
    steps = np.arange(STEPS)
    loss = 2 + 0.15 * np.cos(2 * np.pi * steps / period) + rng.normal(0, 0.01, STEPS)
    series = {
        "loss": np.tile(loss, (2, 1)),
        "grad_norm": np.full((2, STEPS), 1.0),
        "update_norm": np.full((2, STEPS), reach),
        "grad_cosine": np.full((2, STEPS), cosine),
    }
    if written:
        series["parameters_written"] = np.ones((2, STEPS))
    (found,) = judge(Trace("alternating", 0, steps, series), [LossOscillating()], cuts).alerts
    return found


@pytest.mark.parametrize("cuts", [(), (3, 70, 71, 150)])
@pytest.mark.parametrize("period", [2, 8])
def test_steps_that_are_too_short_for_it_are_not_blamed(period, cuts):
    found = alert(0.01, period, cuts)
    assert "the learning rate is not why" in found.cause
    assert "takes back" in found.cause
    assert found.evidence["reach"] == pytest.approx(0.01)


@pytest.mark.parametrize("reach", [0.2, 1.0])
def test_steps_that_reach_as_far_are(reach):
    assert "overshoots the valley" in alert(reach).cause


def test_what_a_step_can_do_is_evidence_where_it_is_less():
    assert "reach" in alert(0.01).evidence
    assert "reach" not in alert(1.0).evidence


def test_where_something_else_writes_the_parameters_nothing_is_known():
    assert "not why" not in alert(0.01, written=True).cause


def test_without_norms_the_rate_is_what_is_usual():
    assert "overshoots the valley" in alert(np.nan).cause
