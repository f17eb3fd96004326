"""A rank's gradients stand out until samples show otherwise, however rare these are."""

from dataclasses import replace

import numpy as np
import pytest

from rankscope.server.detectors.rank.gradient_outlier import RankGradientOutlier
from tests.support.judging import judge
from tests.support.runs.timings import norms

STEPS = 700
# As an agent samples, at every step at first, then at ever fewer.
SAMPLED = [*range(9), 16, *range(64, STEPS, 64)]


@pytest.mark.parametrize("cuts", [(), range(STEPS), (50, 65, 200)], ids=["one", "each", "some"])
def test_gradients_that_are_too_large_at_every_sample_are_one_incident(cuts):
    made = norms(0, factor=4.2, steps=STEPS)
    name = "grad_norm_local"
    sampled_at = np.tile(np.isin(made.steps, SAMPLED), (4, 1))
    made = replace(made, present={name: sampled_at})
    (alert,) = judge(made, [RankGradientOutlier()], cuts).alerts
    assert (alert.state, alert.ranks, alert.last_step) == ("open", (1,), STEPS - 1)


@pytest.mark.parametrize("cuts", [(), range(STEPS)], ids=["one", "each"])
def test_it_is_over_after_as_many_samples_without_it(cuts):
    made = norms(0, factor=6.0, steps=STEPS)
    values = made.series["grad_norm_local"]
    values[1, 100:] /= 6.0
    (alert,) = judge(made, [RankGradientOutlier()], cuts).alerts
    assert (alert.state, alert.ranks) == ("resolved", (1,))
    assert 100 <= alert.last_step < 130
