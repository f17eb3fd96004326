"""Prediction limits, errors of means and falling courses, against what is known of them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from rankscope.server.comparison import bands

NUMBERS = st.floats(-1e6, 1e6, allow_subnormal=False)


@pytest.mark.parametrize("degrees", [*range(1, 12), 23, 40])
@pytest.mark.parametrize("probability", [0.5, 0.9, 0.99, 0.999])
def test_the_quantile_is_student_s(degrees, probability):
    expected = stats.t.ppf(probability, degrees)
    assert bands.t_quantile(probability, degrees) == pytest.approx(expected, abs=1e-6, rel=1e-6)


@pytest.mark.parametrize("runs", [1, 2, 10])
def test_one_run_in_a_hundred_lies_beyond_the_limit(runs):
    """Where the spread differs between trainings as is assumed, of however many runs it is made."""
    random = np.random.default_rng(runs)
    beyond = 0
    for _ in range(6000):
        spread = 0.2 * math.sqrt(bands.ASSUMED_DEGREES / random.chisquare(bands.ASSUMED_DEGREES))
        levels = random.normal(3.0, spread, runs + 1)
        beyond += levels[0] > bands.band(levels[1:], assumed=0.2).limit
    assert 40 < beyond < 80


def test_a_limit_of_many_runs_hardly_rests_on_what_is_assumed():
    levels = np.random.default_rng(3).normal(0, 1, 20)
    reach = [bands.band(levels, assumed=assumed).reach for assumed in (0.0, 1.0, 2.0)]
    assert reach[1] / reach[0] < 1.15
    one = [bands.band(levels[:1], assumed=assumed).reach for assumed in (1.0, 2.0)]
    assert one[1] == pytest.approx(2 * one[0])


@given(arrays(np.float64, st.integers(1, 12), elements=st.floats(-5, 5)), st.floats(0.01, 1))
def test_a_limit_narrows_as_runs_are_added_that_agree(levels, assumed):
    found = bands.band(levels, assumed=assumed)
    assert found.expected == pytest.approx(levels.mean(), abs=1e-9)
    more = bands.band(np.append(levels, levels.mean()), assumed=assumed)
    assert 0 < more.reach < found.reach


@pytest.mark.parametrize("dependence", [0.0, 0.5, 0.8])
def test_the_error_of_a_mean_knows_that_neighbours_depend_on_each_other(dependence):
    random = np.random.default_rng(11)
    means, errors = [], []
    for _ in range(300):
        noise = random.standard_normal(260)
        for i in range(1, 260):
            noise[i] += dependence * noise[i - 1]
        values = noise[60:] + 0.01 * np.arange(200)
        means.append(values.mean())
        errors.append(bands.mean_error(values))
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.2)


def test_a_constant_has_no_error():
    assert bands.mean_error(np.full(20, 3.0)) == 0.0
    assert bands.mean_error(np.array([1.0, 2.0])) == 0.0


@given(arrays(np.float64, st.integers(1, 60), elements=NUMBERS))
def test_a_falling_course_falls_and_keeps_the_mean(values):
    levels, places = bands.falling(values)
    assert (np.diff(levels) < 0).all()
    assert (np.diff(places) > 0).all()
    edges = np.concatenate([[0.0], np.cumsum(_sizes(places))])
    assert edges[-1] == len(values)
    for level, low, high in zip(levels, edges, edges[1:], strict=False):
        block = values[round(low) : round(high)]
        assert level == pytest.approx(block.mean(), rel=1e-6, abs=1e-6)


def _sizes(places):
    """Lengths of blocks whose middles lie there, one after the other."""
    sizes, end = [], 0.0
    for place in places:
        sizes.append(2 * (place - end) + 1)
        end += sizes[-1]
    return sizes


def test_a_falling_course_is_itself():
    levels, places = bands.falling(np.array([4.0, 3.0, 1.0]))
    assert levels.tolist() == [4, 3, 1]
    assert places.tolist() == [0, 1, 2]
    assert math.isclose(bands.falling(np.array([1.0, 2.0, 3.0]))[0][0], 2.0)
