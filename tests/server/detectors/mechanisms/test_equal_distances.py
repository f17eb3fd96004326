"""Events at equal distances among others."""

import numpy as np
import pytest

from rankscope.server.detectors.mechanisms.equal_distances import beat, tail
from rankscope.server.detectors.rank.gradient_outlier import RankGradientOutlier
from tests.support.judging import judge
from tests.support.runs.traces import Trace

SAMPLES = 600


def found(samples):
    """What a rank's events, taken one after the other, say at their most improbable."""
    samples = np.array(samples)
    reported = [
        beat(samples[: n + 1], last + 1, least=5, shortest=8) for n, last in enumerate(samples)
    ]
    return min(
        (one for one in reported if one is not None), key=lambda one: one.chance, default=None
    )


def test_a_distance_is_found_among_other_events():
    random = np.random.default_rng(0)
    other = random.choice(SAMPLES, 12, replace=False)
    one = found(sorted({*range(36, SAMPLES, 37), *other.tolist()}))
    assert one.period == 37
    assert set(one.samples) >= set(range(one.samples[0], SAMPLES, 37))
    assert one.chance < 1e-9


def test_some_may_be_missing():
    samples = [36, 73, 110, 184, 221, 332, 369, 480]
    one = found(samples)
    assert one.period == 37
    assert one.samples == tuple(samples)


@pytest.mark.parametrize("samples", [[], [10], [10, 20, 30, 40], [10, 13, 16, 19, 22]])
def test_too_few_or_too_close(samples):
    assert found(samples) is None


def test_less_than_half_of_them_make_no_beat():
    assert found([10, 110, 210, 310, 410, 421]).period == 100
    assert beat(np.array([10, 40, 120, 200, 310]), SAMPLES, least=5, shortest=8) is None


def test_chance_is_no_smaller_than_it_should_be():
    """Of events at random, at the most improbable of dozens of distances, few come near 1e-5."""
    random = np.random.default_rng(1)
    chances = []
    for _ in range(400):
        samples = np.flatnonzero(random.random(SAMPLES) < random.uniform(0.01, 0.3))
        one = found(samples.tolist())
        chances.append(1.0 if one is None else one.chance)
    assert np.mean(np.array(chances) < 1e-3) < 0.02
    assert min(chances) > 1e-5


def test_tail_of_the_binomial_distribution():
    scipy_stats = pytest.importorskip("scipy.stats")
    for trials, least, chance in ((10, 3, 0.2), (40, 38, 0.5), (7, 0, 0.1)):
        assert tail(trials, least, chance) == pytest.approx(
            scipy_stats.binom.sf(least - 1, trials, chance)
        )


def test_two_ranks_with_beats_are_two_findings():
    """Whatever the windows: the one does not take the place of the other."""
    random = np.random.default_rng(0)
    norms = np.exp(0.2 * random.standard_normal((8, 600)))
    norms[1, 20::40] *= 50
    norms[5, 30::40] *= 50
    trace = Trace("two", 0, np.arange(600), {"grad_norm_local": norms})
    for cuts in ((), (211, 400), range(600)):
        found = judge(trace, [RankGradientOutlier()], cuts)
        assert [(a.ranks, a.evidence["period"]) for a in found.alerts] == [((1,), 40), ((5,), 40)]
