import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.dashboard.figures import smooth


def test_the_first_value_stays_and_the_start_is_not_pulled_to_zero():
    assert np.allclose(smooth(np.array([10.0, 20.0]), 0.9), [10.0, (0.09 * 10 + 0.1 * 20) / 0.19])


def test_nonfinite_values_pass_through_and_are_not_counted():
    with_gap = smooth(np.array([1.0, np.nan, 3.0, np.inf, 2.0]), 0.6)
    without = smooth(np.array([1.0, 3.0, 2.0]), 0.6)
    assert np.isnan(with_gap[1])
    assert with_gap[3] == np.inf
    assert np.array_equal(with_gap[[0, 2, 4]], without)


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(0, 0.999))
def test_a_constant_series_stays_to_the_last_bit(value, weight):
    series = np.full(20, value)
    assert np.array_equal(smooth(series, weight), series)


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50),
    st.floats(0, 0.99),
)
def test_the_result_stays_within_the_values_so_far(values, weight):
    series = np.array(values)
    result = smooth(series, weight)
    slack = 1e-9 * (1 + np.abs(series).max())
    assert (result <= np.maximum.accumulate(series) + slack).all()
    assert (result >= np.minimum.accumulate(series) - slack).all()


@pytest.mark.parametrize("weight", [1.0, -0.1, 2.0])
def test_an_impossible_weight_is_refused(weight):
    with pytest.raises(ValueError, match="at least 0 and below 1"):
        smooth(np.array([1.0, 2.0]), weight)
