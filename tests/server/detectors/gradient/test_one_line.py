"""Gradients that have one direction or its opposite, and others that have not."""

import numpy as np
import pytest

from rankscope.server.detectors.gradient.oscillating import GradientOscillating
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 200


def alerts(cosines, *, inputs=1.0, seed=0):
    random = np.random.default_rng(seed)
    shape = 2, STEPS
    series = {
        "grad_norm": np.exp(0.2 * random.standard_normal(shape)),
        "grad_cosine": np.broadcast_to(cosines, shape),
        "input_rms": inputs * np.exp(0.02 * random.standard_normal(shape)),
    }
    return judge(Trace("line", seed, np.arange(STEPS), series), [GradientOscillating()]).alerts


def signs(seed=0):
    return np.where(np.random.default_rng(seed).random(STEPS) < 0.4, -1.0, 1.0)


@pytest.mark.parametrize(
    ("inputs", "severity", "says"),
    [(3e5, "warning", "not normalised"), (1.0, "info", "Usual causes")],
)
def test_one_direction_to_and_fro(inputs, severity, says):
    (alert,) = alerts(0.999 * signs(), inputs=inputs)
    assert (alert.kind, alert.severity, alert.first_step) == ("gradient.oscillating", severity, 0)
    assert says in alert.cause


@pytest.mark.parametrize(
    "cosines",
    [
        0.999 * np.ones(STEPS),  # a slow descent, or one batch again and again
        -0.999 * np.ones(STEPS),  # a swing across a valley
        0.9 * signs(),
        np.random.default_rng(1).uniform(-1, 1, STEPS),
    ],
)
def test_other_directions(cosines):
    assert not alerts(cosines)
