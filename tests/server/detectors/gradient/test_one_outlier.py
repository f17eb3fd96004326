"""A single odd gradient is no scatter."""

import numpy as np
import pytest

from rankscope.server.detectors.gradient.oscillating import GradientOscillating
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 320


def alerts(outliers, *, scatter=1.0, cuts=()):
    random = np.random.default_rng(5)
    logs = 0.3 * random.standard_normal(STEPS)
    logs[160:] *= scatter
    logs[list(outliers)] += 13.0
    series = {"grad_norm": np.exp(logs)[None], "loss": np.full((1, STEPS), 1.0)}
    found = judge(Trace("norms", 0, np.arange(STEPS), series), [GradientOscillating()], cuts)
    return found.alerts


def test_one_norm_far_above_all_others():
    assert not alerts([160])


@pytest.mark.parametrize("outliers", [(), (170,)])
def test_norms_that_jump_from_step_to_step(outliers):
    (alert,) = alerts(outliers, scatter=8.0)
    assert alert.first_step == pytest.approx(160, abs=25)
