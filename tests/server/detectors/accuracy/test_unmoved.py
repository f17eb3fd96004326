"""Rewards that are after hundreds of steps what they were at first, and such as come on."""

import numpy as np
import pytest

from rankscope.server.detectors.accuracy.stalled import AccuracyStalled
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 400
EACH = np.arange(STEPS)
NOISE = 0.1 * np.random.default_rng(3).standard_normal(STEPS)


def alerts(rewards, *, name="train/reward", since=0, cuts=(), **others):
    noise = np.random.default_rng(4).standard_normal(STEPS)
    series = {"loss": 1 + 0.1 * noise, name: rewards, **others}
    series = {key: np.tile(values, (2, 1)) for key, values in series.items()}
    there = np.tile(EACH >= since, (2, 1))
    trace = Trace("rewards", 0, EACH, series, dict.fromkeys(series.keys() - {"loss"}, there))
    return judge(trace, [AccuracyStalled()], cuts).alerts


@pytest.mark.parametrize("cuts", [(), range(0, STEPS, 7)], ids=["one", "many"])
@pytest.mark.parametrize("rewards", [NOISE - 0.05, np.full(STEPS, -0.28)], ids=["noise", "same"])
def test_one_that_does_not_move(rewards, cuts):
    (alert,) = alerts(rewards, cuts=cuts)
    assert (alert.kind, alert.severity, alert.state) == ("accuracy.stalled", "warning", "open")
    assert (alert.first_step, alert.seen_step < 240) == (0, True)
    assert "`train/reward` has stayed near -0." in alert.title


def test_one_that_begins_to_rise_late_is_told_and_over_then():
    (alert,) = alerts(NOISE - 0.2 + np.maximum(EACH - 260, 0) / 50)
    assert alert.state == "resolved"


@pytest.mark.parametrize(
    ("rewards", "more"),
    [
        (NOISE + EACH / 1000, {}),
        (NOISE - 0.2 * np.exp(-EACH / 60), {}),
        # What falls is another finding; scaled to a mean of 0; all there is from the start on.
        (NOISE - EACH / 50, {}),
        (NOISE - NOISE.mean(), {}),
        (np.ones(STEPS), {}),
        # Never met yet; of a run that has learned before; of something else; another one rises.
        (np.zeros(STEPS), {}),
        (NOISE + 0.9, {"since": 100}),
        (NOISE, {"name": "train/reward_std"}),
        (NOISE, {"name": "train/margin"}),
        (NOISE, {"eval/return": NOISE + EACH / 50}),
    ],
)
def test_one_that_comes_on_or_need_not(rewards, more):
    found = alerts(rewards, **more)
    assert not [alert for alert in found if "has stayed near" in alert.title]


def test_a_slow_rise_is_one():
    """Rewards that rise by no more than twice their own scatter within 400 steps."""
    found = 0
    for seed in range(40):
        random = np.random.default_rng(seed)
        found += bool(alerts(0.3 * random.standard_normal(STEPS) + 0.6 * EACH / STEPS))
    assert found == 0
