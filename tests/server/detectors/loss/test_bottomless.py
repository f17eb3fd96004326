"""Losses that fall below zero: those without a minimum, and those that are likelihoods."""

import numpy as np
import pytest

from rankscope.server.detectors.loss.diverging import LossDiverging
from rankscope.server.detectors.profiles import TURNS
from rankscope.server.window import Occurrence
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 400
EACH = np.arange(STEPS)


def alerts(course, *, grown=20.0, noise=0.05, turns=False, every=1, cuts=()):
    """A run with that loss, whose parameters come to `grown` times their norm."""
    random = np.random.default_rng(5)
    loss = course * (1 + noise * random.standard_normal((2, STEPS)))
    norm = np.tile(8 * (1 + (grown - 1) * EACH / STEPS), (2, 1))
    present = np.tile(EACH % every == 0, (2, 1))
    events = tuple(Occurrence(rank, 3, TURNS, "", {}) for rank in range(2)) if turns else ()
    trace = Trace(
        "below",
        0,
        EACH,
        {"loss": loss, "weight_norm": norm},
        present={"loss": np.ones_like(present), "weight_norm": present},
        events=events,
    )
    found = judge(trace, [LossDiverging()], cuts).alerts
    return [alert for alert in found if alert.key == "below"]


def power(exponent, size=1e-2):
    return 1.0 - size * EACH.astype(float) ** exponent


@pytest.mark.parametrize("course", [power(2), power(4), 1 - np.exp(EACH / 30.0)])
def test_what_has_no_minimum_falls_faster_and_faster(course):
    (alert,) = alerts(course)
    assert (alert.kind, alert.severity, alert.state) == ("loss.diverging", "critical", "open")
    assert alert.first_step < 130
    assert "no minimum" in alert.cause
    assert alert.evidence["last"] < -30
    assert alerts(course, cuts=range(7, STEPS, 31)) == [alert]
    assert len(alerts(course, every=16)) == 1


def test_what_is_beyond_every_likelihood_has_no_minimum_however_it_came_there():
    course = np.where(EACH < 250, 2.0, 2.0 - np.exp(np.clip((EACH - 250) / 4.0, -1, 40)))
    (alert,) = alerts(course, grown=1.3)
    assert (alert.severity, alert.state) == ("critical", "open")
    assert 250 <= alert.first_step <= 270
    assert "as far below zero" in alert.cause
    tiny = np.where(EACH < 30, 1e-9, -3.0)  # normalised advantages
    assert alerts(tiny, grown=1.3) == []


@pytest.mark.parametrize(
    "healthy",
    [
        {"course": 90 - 300 * (1 - np.exp(-EACH / 80.0))},  # a likelihood that settles
        {"course": 3.0 - 2 * np.log1p(EACH)},  # one of data that lie on a line
        {"course": power(1, 0.5)},  # steps of one size along a slope
        {"course": power(2), "grown": 1.2},  # values of states, by parameters of usual size
        {"course": 2.0 * np.exp(-EACH / 60.0)},
        {"course": -power(3)},  # a rise, which is another finding
        {"course": np.zeros(STEPS)},
    ],
)
def test_losses_that_fall_as_others_do(healthy):
    assert alerts(**healthy) == []


def test_one_player_of_a_game_is_information():
    (alert,) = alerts(power(2), turns=True)
    assert alert.severity == "info"


def test_it_lasts_where_the_loss_falls_no_further():
    course = np.where(EACH < 250, power(3), power(3)[250])
    (alert,) = alerts(course)
    assert (alert.state, alert.last_step) == ("open", STEPS - 1)


def test_it_is_over_where_the_loss_is_back():
    course = np.where(EACH < 200, power(3), 1.0)
    (alert,) = alerts(course)
    assert alert.state == "resolved"
