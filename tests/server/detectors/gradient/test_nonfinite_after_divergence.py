"""A gradient that is not finite because training had diverged."""

import numpy as np
import pytest

from rankscope.server.detectors.gradient.nonfinite import GradientNonFinite
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS, AT = 80, 60


def found(losses):
    """The alert of a job whose gradients are infinite from step `AT` on."""
    norms = np.ones((2, STEPS))
    norms[:, AT:] = np.inf
    series = {"loss": np.broadcast_to(losses, (2, STEPS)).copy(), "grad_norm": norms}
    [alert] = judge(Trace("grown", 0, np.arange(STEPS), series), [GradientNonFinite()]).alerts
    return alert


@pytest.mark.parametrize("sign", [1, -1])
def test_a_loss_that_grew_without_bound_is_its_cause(sign):
    steps = np.arange(STEPS)
    alert = found(sign * np.where(steps < 30, 0.5, 0.5 * 3.0 ** (steps - 30.0)))
    assert alert.first_step == AT
    assert "training had diverged" in alert.cause
    assert "a learning rate that is too high" in alert.remedy
    assert "division by zero" not in alert.remedy


@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_single_values_of_a_loss_are_no_divergence(size):
    losses = size * np.exp(2.0 * np.random.default_rng(1).standard_normal(STEPS))
    alert = found(losses)
    assert "diverged" not in alert.cause
