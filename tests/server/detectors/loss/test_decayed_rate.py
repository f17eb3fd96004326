"""Plateaus of jobs whose learning rate has decayed before there are enough losses."""

import numpy as np
import pytest

from rankscope.server.detectors.loss.plateau import LossPlateau
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 220


def alerts(*, worth=0.0, later=1.0, known=True, cuts=()):
    """A cosine to zero, below a tenth of its peak for the last fifth; the loss is ln 10.

    Args:
        worth: share of the deviance explained.
        later: what the loss is times, once the rate has decayed.
        known: that share is posted.
    """
    each, shape = np.arange(STEPS), (2, STEPS)
    random = np.random.default_rng(0)
    rate = 0.05 * 0.5 * (1 + np.cos(np.pi * each / STEPS))
    loss = 2.303 * np.where(rate < 0.005, later, 1.0) * (1 - worth * (each > 20))
    loss = loss * (1 + 0.01 * random.standard_normal(shape))
    series = {
        "loss": loss,
        "lr": rate * np.ones((2, 1)),
        "update_ratio": np.full(shape, 2e-3),
        "accuracy": np.full(shape, 0.1 + worth),
    }
    if known:
        series["explained_deviance"] = 1 - loss / 2.303
    return judge(Trace("decayed", 0, each, series), [LossPlateau()], cuts).alerts


@pytest.mark.parametrize("cuts", [(), range(0, STEPS, 33)], ids=["one", "many"])
def test_steps_of_a_decayed_rate_count_as_steps_in_which_nothing_was_learned(cuts):
    (alert,) = alerts(cuts=cuts)
    assert (alert.severity, alert.state, alert.first_step) == ("warning", "open", 0)


@pytest.mark.parametrize("healthy", [{"worth": 0.6}, {"later": 0.5}, {"known": False}])
def test_what_has_learned_or_learns_then_or_is_not_known(healthy):
    # A remark of before is over when as many losses say so.
    assert [alert for alert in alerts(**healthy) if alert.severity != "info"] == []
