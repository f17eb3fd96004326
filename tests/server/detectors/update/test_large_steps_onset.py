"""Since when steps are too large, where they are so long before it shows."""

import numpy as np
import pytest

from rankscope.server.detectors.lr.too_high import RateTooHigh
from rankscope.server.detectors.update.ratio import UpdateRatio
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 240


def run(**series):
    rows = {name: np.tile(values, (2, 1)) for name, values in series.items()}
    return Trace("large", 0, np.arange(STEPS), {"lr": np.full((2, STEPS), 0.1), **rows})


def diverging(update):
    """A loss that falls up to step 150, and then rises beyond where it began."""
    steps = np.arange(STEPS)
    noise = 0.01 * np.random.default_rng(0).standard_normal(STEPS)
    loss = np.where(steps < 150, 2.3 * np.exp(-steps / 60), 0.2 + 0.1 * (steps - 150.0)) + noise
    return judge(run(loss=loss, update_ratio=update), [RateTooHigh()]).of("lr.too_high")


@pytest.mark.parametrize(("since", "size", "dated"), [(40, 0.3, 40), (40, 0.05, 150)])
def test_a_rate_is_too_high_since_it_writes_over_the_parameters(since, size, dated):
    update = np.where(np.arange(STEPS) < since, 0.004, size)
    (alert,) = diverging(update)
    assert alert.first_step == pytest.approx(dated, abs=0 if dated == since else 10)


def test_single_large_steps_do_not_date_it():
    update = np.where(np.arange(STEPS) % 3 == 0, 0.3, 0.05)
    (alert,) = diverging(update)
    assert alert.first_step == pytest.approx(150, abs=10)


@pytest.mark.parametrize("cuts", [(), range(0, STEPS, 7)], ids=["one", "many"])
def test_steps_that_were_always_too_large_are_so_from_the_first(cuts):
    """At first they may be those of parameters that grow from nothing."""
    update = np.maximum(0.4 / (1 + np.arange(STEPS) / 5), 0.045)
    (alert,) = judge(run(update_ratio=update), [UpdateRatio()], cuts).of("update.ratio")
    assert (alert.first_step, alert.severity) == (0, "warning")
    assert alert.seen_step > 60


def test_those_that_become_too_large_are_dated_there():
    update = np.where(np.arange(STEPS) < 150, 0.01, 0.08)
    (alert,) = judge(run(update_ratio=update), [UpdateRatio()]).of("update.ratio")
    assert alert.first_step == 150
