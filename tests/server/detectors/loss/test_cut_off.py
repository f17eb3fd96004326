"""A loss that stays because inputs, or outputs, are the same for every sample."""

import numpy as np
import pytest

from rankscope.server.detectors.loss.plateau import LossPlateau
from tests.support.judging import judge
from tests.support.runs.traces import Trace


def alert(steps=300, **spreads):
    random = np.random.default_rng(0)
    shape = (2, steps)
    series = {
        "loss": 2.3 + 0.02 * random.standard_normal(shape),
        "explained_deviance": 0.002 * random.standard_normal(shape),
        "update_ratio": np.full(shape, 2e-3),
        "input_rms": np.full(shape, 1.0),
        "accuracy": np.full(shape, 0.1),
    } | {name: np.full(shape, value) for name, value in spreads.items()}
    (found,) = judge(Trace("flat", 0, np.arange(steps), series), [LossPlateau()]).alerts
    return found


def test_inputs_that_are_all_the_same_are_named():
    assert "inputs of a batch are one and the same" in alert(input_spread=0.0).cause


@pytest.mark.parametrize("spread", [0.0, 1e-8])
def test_outputs_that_are_all_the_same_are_named(spread):
    found = alert(input_spread=0.6, output_spread=spread)
    assert "have one and the same direction" in found.cause


def test_what_differs_is_not():
    cause = alert(input_spread=0.6, output_spread=5e-7).cause
    assert "the same direction" not in cause
    assert "one and the same" not in cause
