"""Outputs in the shape of their inputs that are all the same."""

import numpy as np
import pytest

from rankscope.server.detectors.layer.dead import LayerDead
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 400


def alerts(*, spread=0.002, since=0, begins=0.0, falls=False, inputs=0.7, cuts=(), seed=0):
    random = np.random.default_rng(seed)
    each, shape = np.arange(STEPS), (1, STEPS)
    loss = 20 + 10 * (np.linspace(1, 0, STEPS) if falls else np.exp(-each / 30))
    spreads = np.where(each < since, 0.2, spread + begins * np.exp(-each / 12)) * np.exp(
        0.3 * random.standard_normal(shape)
    )
    series = {
        "loss": loss + 0.3 * random.standard_normal(shape),
        "input_spread": np.full(shape, inputs),
        "reconstruction_spread": spreads,
        "tensors_without_gradient": np.zeros(shape),
    }
    return judge(Trace("rebuilt", seed, each, series), [LayerDead()], cuts).alerts


def test_not_where_the_code_begins_to_be_used_before_the_loss_shows_it():
    growing = np.maximum(0.001, 0.0002 * np.exp(np.arange(STEPS) / 35))
    assert not alerts(spread=growing)
    # One that collapses later was not collapsed from the start.
    late = np.where(np.arange(STEPS) < 180, growing, 1e-4)
    (alert,) = alerts(spread=late)
    assert alert.first_step == pytest.approx(180, abs=20)


def test_rounding_that_grows_is_no_code():
    rounded = np.where(np.arange(STEPS) < 40, 1e-6, 2e-4)
    (alert,) = alerts(spread=rounded)
    assert (alert.state, alert.first_step) == ("open", 0)


@pytest.mark.parametrize("since", [0, 120])
def test_every_input_is_given_back_as_the_same_output(since):
    (alert,) = alerts(since=since)
    assert (alert.kind, alert.severity, alert.state) == ("layer.dead", "warning", "open")
    assert alert.first_step == pytest.approx(since, abs=20)
    assert "posterior collapse" in alert.cause
    (cut,) = alerts(since=since, cuts=range(0, STEPS, 33))
    assert (cut.first_step, cut.evidence) == (alert.first_step, alert.evidence)


def test_a_network_that_never_began_is_dated_from_its_start():
    (alert,) = alerts(begins=0.2)
    assert alert.first_step == 0


@pytest.mark.parametrize("other", [{"spread": 0.1}, {"falls": True}, {"inputs": 0.05}])
def test_not_where_inputs_shine_through_or_the_loss_falls(other):
    assert not alerts(**other)
