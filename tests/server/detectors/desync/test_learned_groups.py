"""Groups of ranks that are sampled at steps of their own: each difference is one alert."""

from dataclasses import replace

import numpy as np
import pytest

from rankscope.server.detectors.desync.batch import BatchShared
from rankscope.server.detectors.desync.rng import RandomDiverged
from rankscope.server.window import Series
from tests.support.judging import judge
from tests.support.runs.chain import chain

# Ranks 2 and 3 work on one batch together, as do 0 and 1; from here on rank 2 goes its own way.
AT, STEPS, SELDOM = 100, 420, 16


class SampledSeldom:
    """One pair of ranks is sampled seldom after a dense beginning, the other at every step."""

    def __init__(self, scenario, ranks, dense):
        self._scenario = scenario
        self._ranks = ranks
        self._dense = dense

    def windows(self, cuts=()):
        for window in self._scenario.windows(cuts):
            between = (window.steps >= self._dense) & (window.steps % SELDOM != 0)
            seldom = np.isin(window.ranks, self._ranks)[:, None] & between
            digests = {
                name: Series(series.values, series.present & ~seldom)
                for name, series in window.digests.items()
            }
            yield replace(window, digests=digests)


@pytest.mark.parametrize("dense", [0, 40])
@pytest.mark.parametrize(
    ("detector", "kind", "fault"),
    [
        (RandomDiverged, "desync.rng", "draws-more"),
        (BatchShared, "desync.batch", "batch-apart"),
    ],
)
def test_a_pair_that_is_sampled_seldom_has_one_alert_that_stays_open(detector, kind, fault, dense):
    training = chain(0, fault=fault, groups=2, at=AT, steps=STEPS)
    found = judge(SampledSeldom(training, (2, 3), dense), [detector()]).of(kind)
    assert [(alert.state, alert.ranks) for alert in found] == [("open", (2, 3))]
    assert AT <= found[0].seen_step < AT + 2 * SELDOM
    assert found[0].evidence["observed"] >= (STEPS - AT) // SELDOM - 1
