"""Gradients against each other that grow, while the loss still falls."""

import numpy as np
import pytest

from rankscope.server.detectors.rank.gradient_outlier import RankGradientOutlier
from rankscope.server.window import GradientProducts
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 240


def pulling(*, grown, steady=0.2, first=0.3, last=-0.4, gained=1.2):
    """Two ranks whose gradients agree at first and oppose each other later.

    Args:
        first, last: their cosine in the beginning and in the end.
        gained: of a loss of 2.3.
        grown: power of a rank's gradient in the end, over that in the beginning.
        steady: cosine of the mean gradients of consecutive steps.
    """
    random = np.random.default_rng(5)
    late = np.clip((np.arange(STEPS) - 40) / 40, 0, 1)
    noise = 0.1 * random.standard_normal(STEPS)
    cosines = np.clip(first + (last - first) * late + noise, -1, 1)
    squares = 1 + (grown - 1) * late
    products = tuple(
        GradientProducts(
            step=step,
            ranks=np.arange(2),
            squares=np.full(2, squares[step]),
            products=np.full(2, cosines[step] * squares[step]),
            others=np.full(2, squares[step]),
        )
        for step in range(STEPS)
    )
    # All the way: it never stands.
    losses = np.tile(2.3 - gained * np.linspace(0, 1, STEPS), (2, 1))
    series = {"loss": losses, "grad_cosine": np.full((2, STEPS), steady)}
    return Trace("pulling", 5, np.arange(STEPS), series, products=products)


@pytest.mark.parametrize(("grown", "found"), [(3.0, [("opposed", (0, 1), 0)]), (0.4, [])])
def test_what_has_become_as_large_as_the_gradient_was_need_not_stand(grown, found):
    alerts = judge(pulling(grown=grown), [RankGradientOutlier()]).alerts
    assert [(a.key, a.ranks, a.first_step) for a in alerts] == found


def test_halves_of_one_fixed_batch_cancel_in_the_end():
    assert judge(pulling(grown=3.0, steady=0.999), [RankGradientOutlier()]).alerts == ()


@pytest.mark.parametrize(("gained", "found"), [(0.01, [("opposed", (0, 1), 0)]), (0.6, [])])
def test_gradients_that_cancel_from_the_start_on_teach_nothing(gained, found):
    alerts = judge(
        pulling(grown=1.0, first=-0.97, last=-0.97, gained=gained), [RankGradientOutlier()]
    ).alerts
    assert [(a.key, a.ranks, a.first_step) for a in alerts] == found
