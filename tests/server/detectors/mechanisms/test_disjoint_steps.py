"""Losses of workers that never have a step in common, as of an asynchronous parameter server."""

import numpy as np
import pytest

from rankscope.server.detectors.loss.diverging import LossDiverging
from rankscope.server.detectors.loss.oscillating import LossOscillating
from rankscope.server.detectors.mechanisms.disjoint_steps import Turns
from rankscope.server.detectors.rank.loss_outlier import RankLossOutlier
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 400


def found(*, workers=2, odd=0, lies=1.0, seed=0, fast=1, cuts=(), by=RankLossOutlier):
    """Rank 0 serves; the worker `odd` has a loss that lies higher, from the first step on.

    Args:
        fast: steps that the first worker takes in a row.
    """
    random = np.random.default_rng(seed)
    order = [1] * fast + list(range(2, workers + 1))
    turn = np.array([order[step % len(order)] for step in range(STEPS)])
    level = 1.2 * np.exp(-np.arange(STEPS) / 60) + 0.2
    losses = level * np.exp(0.15 * random.standard_normal((workers + 1, STEPS)))
    if odd:
        losses[odd] += lies * (1.4 - level)
    present = np.arange(workers + 1)[:, None] == turn
    present[1:, ::100] = True  # all begin with one version, and pull the same one now and then
    trace = Trace(
        "workers",
        seed,
        np.arange(STEPS),
        {"loss": np.where(present, losses, 0.0)},
        present={"loss": present},
    )
    return judge(trace, [by()], cuts)


def test_one_of_three_workers_that_learns_something_else_is_named():
    (alert,) = found(workers=3, odd=2).alerts
    assert alert.ranks == (2,)
    assert alert.severity in ("warning", "critical")
    assert alert.first_step <= 3


def test_of_two_workers_both_are():
    (alert,) = found(odd=2).alerts
    assert alert.ranks == (1, 2)


@pytest.mark.parametrize("fast", [1, 3])
@pytest.mark.parametrize("workers", [2, 3])
def test_workers_that_are_alike_are_not(workers, fast):
    judged = found(workers=workers, fast=fast)
    assert not judged.alerts
    assert judged.checks["rank.loss_outlier"].status == "ok"


def test_how_the_steps_are_cut_into_windows_makes_no_difference():
    whole, cut = found(odd=2), found(odd=2, cuts=(3, 50, 51, 207))
    assert [(a.first_step, a.ranks) for a in whole.alerts] == [
        (a.first_step, a.ranks) for a in cut.alerts
    ]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_levels_of_their_own_are_no_swing_of_the_loss(seed):
    assert not found(odd=2, seed=seed, by=LossOscillating).alerts


def means(posted, losses, cuts):
    """Steps and means that come of losses, [R, N], where they are posted, [R, N]."""
    ranks, steps = losses.shape
    trace = Trace(
        "turns",
        0,
        np.arange(steps),
        {"loss": np.where(posted, losses, 0.0)},
        present={"loss": posted},
    )
    turns, found = Turns(), []
    for window in trace.windows(cuts):
        found += zip(*(part.tolist() for part in turns.means(window, "loss")), strict=True)
    return found


CUTS = pytest.mark.parametrize(
    "cuts", [(), range(0, STEPS, 20), range(STEPS)], ids=["one", "many", "each"]
)


def alternating(common_every=50):
    posted = np.arange(2)[:, None] == np.arange(STEPS) % 2
    posted[:, ::common_every] = True
    return posted


@CUTS
def test_rounds_ascend_and_do_not_depend_on_windows(cuts):
    losses = np.array([[1.0], [3.0]]) + np.zeros((2, STEPS))
    found = means(alternating(), losses, cuts)
    steps = [step for step, _ in found]
    assert steps == sorted(set(steps))
    assert found == means(alternating(), losses, ())
    assert {mean for step, mean in found if step >= 50} == {2.0}


@CUTS
def test_a_value_that_is_not_finite_stays_so(cuts):
    losses = np.ones((2, STEPS))
    losses[1, 100:] = np.inf
    found = means(alternating(), losses, cuts)
    assert all(np.isfinite(mean) == (step < 100) for step, mean in found)


@CUTS
def test_the_one_that_is_left_goes_on(cuts):
    posted = alternating()
    posted[1, 200:] = False
    found = means(posted, np.ones((2, STEPS)), cuts)
    late = [step for step, _ in found if step >= 300]
    assert len(late) == STEPS // 2 - 150


@CUTS
def test_workers_at_levels_of_their_own_do_not_diverge(cuts):
    for seed in range(4):
        result = found(odd=2, seed=seed, cuts=cuts, by=LossDiverging)
        assert [alert for alert in result.alerts if alert.severity != "info"] == []
