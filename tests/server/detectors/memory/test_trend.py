"""When a quantity grows steadily, and what looks like it."""

import numpy as np
import pytest

from rankscope.server.detectors.memory.blocks import Minima
from rankscope.server.detectors.memory.trend import certainty, steady, theil_sen

LIMITS = {"least": 24, "certain": 20.0, "even": 0.5, "keeps": 0.9}
X = np.arange(100.0)


def test_the_slope_is_the_median_of_all_pairs():
    y = 3 * X
    y[::10] = 1000
    assert theil_sen(X, y) == pytest.approx(3, rel=0.05)
    assert theil_sen(X[:1], y[:1]) == 0


def test_related_residuals_make_a_slope_less_certain():
    noise = np.random.default_rng(0).standard_normal(len(X))
    walk = np.cumsum(noise)
    walk *= np.std(noise) / np.std(walk)
    alone, related = (certainty(X, X + n, theil_sen(X, X + n)) for n in (noise, walk))
    assert related < alone / 2


def test_a_line_without_noise_is_certain_and_one_that_falls_is_none():
    trend = steady(X, 5 + 2 * X, **LIMITS)
    assert (trend.first, trend.slope) == (0, pytest.approx(2))
    assert steady(X, 5 - 2 * X, **LIMITS) is None
    assert steady(X, np.full(100, 5.0), **LIMITS) is None


def test_the_beginning_is_found():
    y = np.maximum(X - 30, 0) + 0.1 * np.random.default_rng(0).standard_normal(100)
    assert steady(X, y, **LIMITS).first in range(27, 35)


@pytest.mark.parametrize(
    "values",
    [
        np.sqrt(X),
        np.log1p(X),
        1 - np.exp(-X / 30),
        (X > 30) * 1.0 + (X > 60),
        X % 40,
        np.minimum(X, 50),
    ],
    ids=["root", "logarithm", "saturation", "two steps", "sawtooth", "full"],
)
def test_what_does_not_go_on_evenly_is_no_growth(values):
    assert steady(X, values, **LIMITS) is None


def test_blocks_keep_the_smallest_values_in_bounded_memory():
    minima = Minima()
    complete = [minima.push(step, np.array([float(step), np.nan])) for step in range(4000)]
    assert complete[:8] == [False, False, False, True] * 2
    assert len(minima.rows) < 128
    steps, values = minima.of(0)
    assert values[0] == 0
    assert minima.size == 32
    assert (np.diff(steps) == 32).sum() >= len(steps) - 2
    assert (values <= steps).all()
    assert len(minima.of(1)[0]) == 0


def test_another_process_has_memory_of_its_own():
    minima = Minima()
    for step in range(8):
        minima.push(step, np.array([1.0]))
    minima.forget(0)
    minima.push(8, np.array([5.0, 7.0]))  # and a second rank comes
    for step in range(9, 12):
        minima.push(step, np.array([6.0, 8.0]))
    assert minima.of(0)[1].tolist() == [5.0]
    assert minima.of(1)[1].tolist() == [7.0]
