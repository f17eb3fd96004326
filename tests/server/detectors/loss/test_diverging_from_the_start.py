"""A loss that has risen since the first steps, and one that need not fall."""

import numpy as np
import pytest

from rankscope.server.detectors.loss.diverging import LossDiverging
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 200
AT = np.arange(STEPS)


def alert(course, *, first=0, logged=(), rate=8.0, cuts=()):
    noise = np.exp(0.05 * np.random.default_rng(2).standard_normal((2, STEPS)))
    series = {"loss": course * noise, "lr": np.full((2, STEPS), rate)}
    series |= {name: np.full((2, STEPS), 1.0) for name in logged}
    trace = Trace("rises", 0, AT + first, series)
    (found,) = [a for a in judge(trace, [LossDiverging()], cuts).alerts if not a.key]
    return found


@pytest.mark.parametrize("cuts", [(), (4, 11, 90)])
def test_one_that_never_learned_is_not_told_to_go_back(cuts):
    found = alert(1.1**AT, cuts=cuts)
    assert (found.severity, found.first_step) == ("critical", 0)
    assert "nothing was learned in this run" in found.cause
    assert "(of 8)" in found.cause
    assert "checkpoint" not in found.remedy


def test_of_a_server_the_rate_may_not_be_known():
    assert "NaN" not in alert(1.1**AT, rate=np.nan).cause


def test_one_that_goes_on_from_elsewhere_had_learned():
    assert "in this run" not in alert(1.1**AT, first=4000).cause


def test_one_that_fell_at_first_had_learned():
    assert "in this run" not in alert(np.where(AT < 100, 5 * 0.97**AT, 20.0)).cause


@pytest.mark.parametrize("name", ["episode_return", "train/mean_reward"])
def test_where_rewards_are_logged_it_need_not_fall(name):
    course = np.where(AT < 100, 0.99**AT, 4.0)
    assert alert(course).severity == "critical"
    found = alert(course, logged=(name,))
    assert found.severity == "info"
    assert "Rewards are logged" in found.cause


def test_one_that_runs_away_is_none_of_these():
    found = alert(np.where(AT < 100, 0.99**AT, 40.0), logged=("episode_return",))
    assert found.severity == "critical"


@pytest.mark.parametrize("cuts", [(), (120,), range(0, STEPS, 10)])
def test_a_reward_that_comes_later_changes_nothing(cuts):
    at = np.arange(STEPS)
    noise = np.exp(0.05 * np.random.default_rng(2).standard_normal((2, STEPS)))
    series = {
        "loss": np.where(at < 100, 0.99**at, 4.0) * noise,
        "episode_return": np.ones((2, STEPS)),
    }
    present = {"episode_return": np.tile(at >= 190, (2, 1))}
    trace = Trace("rises", 0, at, series, present=present)
    (found,) = judge(trace, [LossDiverging()], cuts).alerts
    assert found.severity == "critical"


OTHERS = ["reward_std", "rewards/chosen", "rewards/margins", "rewards/accuracies", "reward_acc"]


@pytest.mark.parametrize("name", [*OTHERS, "returned_batches"])
def test_other_names_are_no_rewards(name):
    course = np.where(AT < 100, 0.99**AT, 4.0)
    assert alert(course, logged=(name,)).severity == "critical"
