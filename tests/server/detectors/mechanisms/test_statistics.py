"""The shared statistics, against their definitions and against known answers."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rankscope.server.detectors.mechanisms.sliding_median import SlidingMedian
from rankscope.server.detectors.mechanisms.statistics import (
    Baseline,
    Progress,
    Spacing,
    change_point,
    lag_one,
    mann_kendall,
    mean_over_ranks,
    median_error,
    others_median,
    rank_rows,
    residual_maker,
    robust_sigma,
    spectral_peak,
)
from rankscope.server.window import Series, Window

numbers = st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=30)


def window(values, present):
    values, present = np.array(values, dtype=float), np.array(present, dtype=bool)
    ranks, steps = values.shape
    return Window(
        ranks, np.arange(ranks), np.arange(10, 10 + steps), {"loss": Series(values, present)}
    )


def test_mean_takes_only_what_was_posted():
    some = window([[1, 0, 3], [5, 0, 0]], [[1, 0, 1], [1, 0, 0]])
    steps, means = mean_over_ranks(some, "loss")
    assert steps.tolist() == [10, 12]
    assert means.tolist() == [3, 3]
    steps, rows = rank_rows(some, "loss")
    assert steps.tolist() == [10, 12]
    assert np.array_equal(rows, [[1, 5], [3, np.nan]], equal_nan=True)


def test_a_metric_that_nobody_posts_has_no_values():
    steps, means = mean_over_ranks(window([[1.0]], [[1]]), "accuracy")
    assert len(steps) == len(means) == 0
    steps, rows = rank_rows(window([[1.0]], [[1]]), "accuracy")
    assert (len(steps), rows.shape) == (0, (0, 1))


def test_robust_sigma_of_normal_noise_is_its_standard_deviation():
    noise = 3 * np.random.default_rng(0).standard_normal(20_000)
    noise[:100] = 1e6
    assert robust_sigma(noise) == pytest.approx(3, rel=0.03)


@given(st.lists(st.integers(-20, 20), min_size=3, max_size=30, unique=True))
def test_mann_kendall_is_kendalls_tau(values):
    tau = stats.kendalltau(np.arange(len(values)), values).statistic
    n = len(values)
    score = tau * n * (n - 1) / 2
    spread = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    expected = (score - math.copysign(min(1, abs(score)), score)) / spread
    assert mann_kendall(values) == pytest.approx(expected, abs=1e-9)


def test_mann_kendall_of_next_to_nothing():
    assert mann_kendall([1.0, 2.0]) == 0.0


@pytest.mark.parametrize("at", [1, 7, 20, 39])
def test_change_point_finds_a_step(at):
    values = np.where(np.arange(40) < at, 0.0, 2.0)
    assert change_point(values) == (at, 0.0, 2.0)


def test_change_point_of_next_to_nothing():
    assert change_point(np.array([3.0])) == (0, 3.0, 3.0)
    assert change_point(np.array([])) == (0, 0.0, 0.0)


@given(numbers)
def test_change_point_has_the_least_squares(values):
    values = np.array(values)

    def cost(at):
        return sum(float(((part - part.mean()) ** 2).sum()) for part in np.split(values, [at]))

    at, before, after = change_point(values)
    assert cost(at) <= min(cost(i) for i in range(1, len(values))) * (1 + 1e-6) + 1e-3
    assert before == pytest.approx(values[:at].mean(), abs=1e-6)
    assert after == pytest.approx(values[at:].mean(), abs=1e-6)


def test_lag_one_of_a_zigzag():
    assert lag_one(np.array([1.0, -1.0] * 32)) == pytest.approx(-1, abs=0.05)
    assert lag_one(np.zeros(8)) == 0.0


@pytest.mark.parametrize("period", [2, 3.3, 5, 8, 11.7, 15])
def test_spectral_peak_finds_a_period_wherever_it_lies_between_the_bins(period):
    share, found = spectral_peak(np.cos(2 * np.pi * np.arange(64) / period + 0.3))
    assert share > 0.85
    assert found == pytest.approx(period, rel=0.05)


def test_spectral_peak_of_noise_and_of_nothing():
    random = np.random.default_rng(1)
    flat = residual_maker(64, 2)
    shares = [spectral_peak(flat @ random.standard_normal(64))[0] for _ in range(2000)]
    assert max(shares) < 0.65
    assert np.mean(np.array(shares) > 0.53) < 0.005
    assert spectral_peak(np.zeros(64)) == (0.0, math.inf)


def test_residuals_of_a_parabola_are_nothing():
    x = np.arange(64.0)
    assert np.abs(residual_maker(64, 2) @ (3 + x - 0.1 * x**2)).max() < 1e-9


def test_progress_measures_from_the_start_to_the_best_block():
    progress = Progress()
    for step in range(4):
        progress.push(step, 8.0)
    assert math.isnan(progress.start)
    assert progress.scale == 0.0
    for step in range(4, 40):
        progress.push(step, 8.0 if step < 15 else 2.0)
    assert progress.start == 8.0
    assert progress.best == 2.0
    assert progress.best_step == 29
    assert progress.scale == 6.0


def test_a_fast_run_has_left_its_start_behind_after_twenty():
    progress = Progress()
    for step in range(30):
        progress.push(step, 9.0 if step < 3 else 1.0)
    assert progress.start == 1.0


def test_blocks_are_handed_out_as_they_are_complete():
    progress = Progress()
    blocks = [progress.push(step, float(step)) for step in range(0, 60, 2)]
    assert [b for b in blocks if b] == [(0, 18, 9.0), (20, 38, 29.0), (40, 58, 49.0)]


def test_spacing_gives_observations_in_steps():
    spacing = Spacing()
    assert spacing.steps(10) == 10
    for step in range(0, 50, 5):
        spacing.push(step)
    assert spacing.steps(10) == 50


@given(st.lists(st.floats(0.001, 1e3), min_size=1, max_size=200), st.integers(1, 20))
def test_baseline_knows_the_highest_of_those_it_remembers(values, size):
    baseline = Baseline(size)
    for value in values:
        baseline.accept(value)
    assert baseline.highest == max(values[-size:])
    assert len(baseline) == min(len(values), size)


def test_z_does_not_depend_on_the_unit_of_a_loss():
    random = np.random.default_rng(3)
    course = 2 * np.exp(-0.05 * np.arange(64)) * np.exp(0.1 * random.standard_normal(64))
    z = []
    for factor in (1e-3, 1.0, 1e3):
        baseline = Baseline()
        for value in course * factor:
            baseline.accept(float(value))
        z.append(baseline.z(0.5 * factor))
    assert z[0] == pytest.approx(z[1], rel=1e-6)
    assert z[2] == pytest.approx(z[1], rel=1e-6)
    # On the falling course, what would be nothing on the raw scale is far off.
    assert z[1] > 8


def test_z_without_a_logarithm():
    baseline = Baseline()
    for value in np.random.default_rng(4).standard_normal(64):
        baseline.accept(float(value))
    assert not baseline.positive
    assert abs(baseline.z(0.0)) < 3
    assert baseline.z(50.0) > 8


def test_z_beside_values_that_are_all_the_same():
    baseline = Baseline(size=8)
    for _ in range(8):
        baseline.accept(0.0)
    assert not baseline.positive
    assert baseline.z(1.0) == math.inf


def test_an_exact_zero_is_no_change_of_sign():
    baseline = Baseline(size=16)
    for value in [0.0] + [1e-3] * 15:
        baseline.accept(value)
    assert baseline.positive
    assert baseline.z(1.0) > 8


@given(st.integers(2, 9), st.integers(0, 2**32 - 1))
def test_others_median_is_what_it_says(ranks, seed):
    random = np.random.default_rng(seed)
    values = np.round(random.standard_normal((12, ranks)), 1)
    values[random.random(values.shape) < 0.2] = np.nan
    found = others_median(values)
    for row, medians in zip(values, found, strict=True):
        for rank in range(ranks):
            others = np.delete(row, rank)
            others = others[~np.isnan(others)]
            if np.isnan(row[rank]) or not len(others):
                assert np.isnan(medians[rank])
            else:
                assert medians[rank] == pytest.approx(np.median(others))


@given(st.lists(st.floats(-5, 5).map(lambda v: round(v, 1)), max_size=40), st.integers(1, 9))
def test_a_sliding_median_is_that_of_the_last_values(values, size):
    sliding = SlidingMedian(size)
    for index, value in enumerate(values):
        passed = sliding.push(value)
        assert passed == (values[index - size] if index >= size else None)
        last = values[max(0, index + 1 - size) : index + 1]
        assert sliding.median == np.median(last)
        assert sliding.largest == max(last)
    sliding.clear()
    assert math.isnan(sliding.median)


def test_the_error_of_a_median_is_what_medians_scatter_by():
    random = np.random.default_rng(0)
    values = np.exp(0.3 * random.standard_normal((400, 10)))
    scatter = float(np.log(np.median(values, axis=1)).std())
    for course in (1.0, np.exp(-0.002 * np.arange(4000))):
        assert median_error(values.ravel() * course, 10) == pytest.approx(scatter, rel=0.15)
    assert median_error(np.ones(2), 10) == 0.0
    assert median_error(np.zeros(20), 10) == 0.0
