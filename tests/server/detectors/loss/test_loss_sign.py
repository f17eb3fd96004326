"""A positive loss that is negated, and losses that change their sign by nature."""

import numpy as np
import pytest

from rankscope.server.detectors.loss.diverging import LossDiverging
from rankscope.server.detectors.loss.sign import LossSign
from rankscope.server.detectors.loss.spike import LossSpike
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 200


def losses(seed=0, steps=STEPS, level=0.5):
    draw = np.random.default_rng(seed)
    return level + np.exp(-np.arange(steps) / 30) + 0.03 * draw.standard_normal(steps)


def trace(values):
    return Trace("sign", 0, np.arange(len(values)), {"loss": np.array([values, values])}, {})


def test_a_positive_loss_is_negated_once_each_time():
    sign = LossSign()
    values = losses()
    values[80:90] *= -1
    values[150:] *= -1
    turned = [step for step, value in enumerate(values) if sign.push(float(value))]
    assert turned == [80, 150]
    assert (sign.flips, sign.natural) == (2, False)


@pytest.mark.parametrize("seed", range(20))
def test_a_loss_that_drifts_through_zero_changes_its_sign_by_nature(seed):
    draw = np.random.default_rng(seed)
    sign = LossSign()
    values = 1.0 - 0.01 * np.arange(STEPS) + 0.1 * draw.standard_normal(STEPS)
    turned = [sign.push(float(value)) for value in values]
    assert not any(turned)
    assert sign.natural


def test_one_that_is_negative_from_the_start_is_not_judged():
    sign = LossSign()
    turned = [sign.push(-float(value)) for value in losses()]
    assert not any(turned)
    assert sign.natural


@pytest.mark.parametrize(
    ("until", "severity"), [(81, "info"), (90, "warning"), (STEPS, "critical")]
)
def test_the_alert_says_that_it_turned_negative(until, severity):
    values = losses()
    values[80:until] *= -1
    (found,) = judge(trace(values), [LossSpike()]).alerts
    assert (found.severity, found.first_step) == (severity, 80)
    assert "turned negative at step 80" in found.title
    assert "wrong sign" in found.cause


def test_a_loss_that_was_negated_once_can_still_diverge():
    values = losses()
    values[60] *= -1
    values[120:] += np.linspace(0, 3, STEPS - 120)
    (found,) = judge(trace(values), [LossDiverging()]).alerts
    assert found.severity == "critical"
