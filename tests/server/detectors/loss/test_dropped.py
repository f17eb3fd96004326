"""Falls of a loss from one step to the next that are none of an easier question."""

import numpy as np
import pytest

from rankscope.server.detectors.loss.dropped import LossDropped
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 200


def alerts(loss, *, silent=0):
    """Of two ranks and so many more that never have a loss (a server, first stages)."""
    random = np.random.default_rng(0)
    rows = np.tile(loss, (2 + silent, 1)) * np.exp(
        0.02 * random.standard_normal((2 + silent, STEPS))
    )
    there = np.ones(rows.shape, dtype=bool)
    there[2:] = False
    return judge(
        Trace("fall", 0, np.arange(STEPS), {"loss": rows}, {"loss": there}), [LossDropped()]
    ).alerts


def halved(before=2.0, now=0.8, first=None):
    loss = np.where(np.arange(STEPS) < 100, before, now)
    loss[0] = before if first is None else first
    return loss


@pytest.mark.parametrize("silent", [0, 1, 3])
def test_ranks_without_a_loss_keep_nobody_from_judging(silent):
    (alert,) = alerts(halved(), silent=silent)
    assert (alert.severity, alert.first_step) == ("warning", 100)


def test_what_had_exploded_falls_back():
    assert not alerts(halved(before=50.0, now=20.0, first=2.3))


def test_a_first_loss_that_is_no_number_is_no_measure():
    loss = halved(before=50.0, now=20.0, first=np.nan)
    loss[1] = 2.3
    assert not alerts(loss)


@pytest.mark.parametrize(("gradient", "found"), [(0.1, 1), (40.0, 0)])
def test_a_fall_that_the_step_before_can_have_made(gradient, found):
    """Its length, 0.05, times the gradient: 2 of the 1.2 by which the loss fell."""
    rows = np.tile(halved(), (2, 1)) * np.exp(
        0.02 * np.random.default_rng(0).standard_normal((2, STEPS))
    )
    series = {
        "loss": rows,
        "grad_norm": np.full(rows.shape, gradient),
        "update_norm": np.full(rows.shape, 0.05),
    }
    trace = Trace("fall", 0, np.arange(STEPS), series)
    assert len(judge(trace, [LossDropped()]).of("loss.dropped")) == found
