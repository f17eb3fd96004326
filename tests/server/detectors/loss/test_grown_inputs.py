"""A loss that stays while the inputs become others."""

import numpy as np
import pytest

from rankscope.server.detectors.loss.plateau import LossPlateau
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 300


def cause(grows):
    random = np.random.default_rng(0)
    shape = (2, STEPS)
    series = {
        "loss": 2.3 + 0.02 * random.standard_normal(shape),
        "accuracy": np.clip(0.1 + 0.02 * random.standard_normal(shape), 0, 1),
        "update_ratio": np.full(shape, 2e-3),
        "grad_norm": np.exp(0.1 * random.standard_normal(shape)),
        "lr": np.full(shape, 0.01),
        "input_rms": np.tile(np.geomspace(0.5, 0.5 * grows, STEPS), (2, 1)),
    }
    (alert,) = judge(Trace("flat", 0, np.arange(STEPS), series), [LossPlateau()]).alerts
    assert (alert.kind, alert.severity) == ("loss.plateau", "warning")
    return alert.cause


@pytest.mark.parametrize(("grows", "way"), [(16.0, "grown"), (1 / 16, "shrunk")])
def test_inputs_that_grow_are_named(grows, way):
    assert f"the inputs have {way} from a root mean square of 0." in cause(grows)


def test_inputs_that_stay_are_not():
    assert "Meanwhile the inputs" not in cause(1.5)
