"""Since when the loss of one rank is not like the others'."""

import numpy as np
import pytest

from rankscope.server.detectors.mechanisms.statistics import grows_with
from rankscope.server.detectors.rank.loss_outlier import RankLossOutlier
from tests.support.judging import judge
from tests.support.runs.traces import Trace

RANKS, STEPS = 3, 240


def learning(seed, *, start=0.85, end=0.2, middle=60, width=14, noise=0.05):
    """Losses of all ranks that stay, fall and stay: float64 [R, S]."""
    random = np.random.default_rng(seed)
    fallen = 1 / (1 + np.exp((middle - np.arange(STEPS)) / width))
    losses = start - (start - end) * fallen
    return losses * (1 + noise * random.standard_normal((RANKS, STEPS))), fallen


def outlier(losses):
    trace = Trace("onset", 0, np.arange(STEPS), {"loss": losses})
    (alert,) = judge(trace, [RankLossOutlier()]).of("rank.loss_outlier")
    assert alert.ranks == (1,)
    return alert


@pytest.mark.parametrize("seed", range(8))
def test_labels_that_were_wrong_from_the_start_show_as_the_others_learn(seed):
    losses, fallen = learning(seed)
    losses[1] += 0.4 * fallen
    alert = outlier(losses)
    assert alert.first_step == 0
    assert "from the first steps on" in alert.cause


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("at", [60, 90])
def test_what_is_wrong_from_a_step_on_is_dated_there(seed, at):
    losses, fallen = learning(seed, middle=30)
    losses[1, at:] += 0.4 * fallen[at:]
    assert outlier(losses).first_step == pytest.approx(at, abs=4)


@pytest.mark.parametrize("seed", range(8))
def test_scatter_of_the_first_steps_dates_nothing(seed):
    """Returns of a policy: far apart while it learns, and on either side of zero later."""
    random = np.random.default_rng(seed)
    scatter = np.where(np.arange(STEPS) < 30, 0.1, 0.006)
    losses = 0.1 * np.exp(-np.arange(STEPS) / 12) - 0.012
    losses = losses + scatter * random.standard_normal((RANKS, STEPS))
    losses[1, 70:] += 0.022
    assert outlier(losses).first_step == pytest.approx(70, abs=4)


def test_a_multiple_of_a_cause_and_what_begins_later():
    random = np.random.default_rng(1)
    cause = np.linspace(0, 1, 100)
    noise = 0.1 * random.standard_normal(100)
    assert grows_with(cause, 0.5 * cause + noise)
    assert not grows_with(cause, 0.5 * cause * (np.arange(100) >= 60) + noise)
    assert not grows_with(cause, 0.5 * (np.arange(100) >= 60) + noise)
    assert not grows_with(cause, -0.5 * cause + noise)
    assert not grows_with(cause[:10], 0.5 * cause[:10])
    assert not grows_with(np.full(100, np.nan), noise)
