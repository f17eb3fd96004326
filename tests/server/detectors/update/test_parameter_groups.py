"""Parameter groups whose rates lie far apart, and what their steps do."""

import numpy as np
import pytest

from rankscope.server.detectors.update.ratio import UpdateRatio
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 200
EACH = np.arange(STEPS)


def alerts(*, update=0.09, times=100.0, since=0, explained=0.3, until=STEPS, growing=0.0, cuts=()):
    """A run of two groups, of which the second one's rate is so many times as high."""
    random = np.random.default_rng(2)
    shape = (2, STEPS)
    updates = np.where(EACH < 64, update, update / 4) * np.exp(0.05 * random.standard_normal(shape))
    if growing:
        # Parameters that grow from nothing at a steady pace.
        updates = np.tile(growing / (EACH + 1), (2, 1))
    series = {
        "update_ratio": np.where(EACH >= since, updates, 1e-3),
        "lr": np.full(shape, 0.01),
        "lr/0": np.full(shape, 0.01),
        "lr/1": np.full(shape, 0.01) * np.where(EACH < until, times, 1.0),
        "explained_deviance": np.full(shape, explained),
    }
    there = np.tile(EACH >= since, (2, 1))
    trace = Trace("groups", 0, EACH, series, present={"lr/0": there, "lr/1": there})
    return [a for a in judge(trace, [UpdateRatio()], cuts).alerts if a.key == "groups"]


@pytest.mark.parametrize("since", [0, 80])
def test_a_group_whose_rate_is_a_hundred_times_the_others(since):
    update = 0.09 if since == 0 else 0.4
    (alert,) = alerts(since=since, update=update)
    assert (alert.kind, alert.severity, alert.state) == ("update.ratio", "warning", "open")
    assert alert.first_step == since
    assert "Parameter group 1 has a learning rate of 1, 100 times" in alert.title
    assert alert.evidence["rates"] == {"0": 0.01, "1": 1.0}
    assert alerts(since=since, update=update, cuts=range(3, STEPS, 17)) == [alert]


def test_it_lasts_as_long_as_the_rates_lie_apart():
    """Steps are smaller beside parameters that have grown by them."""
    (alert,) = alerts(until=120)
    assert alert.state == "resolved"
    assert 118 <= alert.last_step <= 120


@pytest.mark.parametrize(
    "healthy",
    [
        {"times": 10.0},  # a new head
        {"update": 5e-3, "times": 1000.0},  # rates that fall layer by layer
        {"times": 1.0},
    ],
)
def test_rates_and_steps_as_they_are_used(healthy):
    assert alerts(**healthy) == []


def test_what_teaches_is_information():
    (alert,) = alerts(update=0.05, explained=0.8)
    assert alert.severity == "info"


def test_answers_that_have_become_worse_need_less():
    assert alerts(growing=1.0, explained=0.3) == []
    (alert,) = alerts(growing=1.0, explained=-0.5)
    assert alert.severity == "warning"
