"""Steps that add up to next to nothing: whether that is the rate's fault."""

import numpy as np
import pytest

from rankscope.server.detectors.lr.too_low import RateTooLow
from tests.support.judging import judge, verdict
from tests.support.runs.traces import Trace

STEPS = 440


def alerts(*, update=3e-5, explained=-0.05, gain=0.0, warm=False, until=STEPS, lost=False, seed=0):
    random = np.random.default_rng(seed)
    shape = 2, STEPS
    loss = (
        1.4 * (1 - gain * np.linspace(0, 1, STEPS)) * np.exp(0.05 * random.standard_normal(shape))
    )
    if lost:
        # It falls by a third, until something puts it back at step 250.
        loss[:, :250] *= 1 - np.linspace(0, 1 / 3, 250)
    series = {
        "loss": loss,
        "lr": 1e-5 * (1 + np.arange(STEPS) * warm) * np.ones(shape),
        "update_ratio": update * np.exp(0.1 * random.standard_normal(shape)),
    }
    later = np.arange(STEPS) >= until
    series["update_ratio"][:, later] = 1e-2
    if explained is not None:
        series["explained_deviance"] = explained + 0.02 * random.standard_normal(shape)
    trace = Trace("small steps", seed, np.arange(STEPS), series)
    whole, cut = (judge(trace, [RateTooLow()], cuts).alerts for cuts in ((), range(0, STEPS, 33)))
    assert [verdict(a) + (a.cause,) for a in whole] == [verdict(a) + (a.cause,) for a in cut]
    return whole


def test_all_steps_together_are_too_small_to_learn_anything():
    (alert,) = alerts()
    assert (alert.kind, alert.severity, alert.first_step) == ("lr.too_low", "warning", 0)
    assert "440 steps had one direction" in alert.cause


def test_what_is_said_of_it_stays_once_it_is_over():
    (alert,) = alerts(until=300)
    assert alert.state == "resolved"


@pytest.mark.parametrize(
    "other",
    [
        {"update": 1e-3},  # as much as it takes
        {"explained": 0.4},  # a training that goes on from something learned
        {"explained": None},
        {"gain": 0.3},
        {"warm": True},
        {"lost": True},
    ],
)
def test_not_where_the_steps_suffice_or_something_is_known(other):
    assert not alerts(**other)
