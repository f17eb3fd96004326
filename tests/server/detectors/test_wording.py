import math

import pytest

from rankscope.server.detectors import wording


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([2], "rank 2"),
        ([3, 0], "ranks 0 and 3"),
        ([0, 1, 3], "ranks 0, 1 and 3"),
        (range(8, 16), "ranks 8-15"),
        ([0, 1, 2, 5, 9, 10, 11], "ranks 0-2, 5 and 9-11"),
    ],
)
def test_ranks(numbers, text):
    assert wording.ranks(numbers) == text


def test_many_are_not_all_named():
    assert wording.listing([str(n) for n in range(20)], most=3) == "0, 1, 2 and 17 more"
    assert wording.listing([]) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.0123456, "0.0123"),
        (1.0, "1"),
        (2.345678, "2.35"),
        (12345.6, "12,346"),
        (3e9, "3.00e+09"),
        (-4e-7, "-4.00e-07"),
        (math.nan, "NaN"),
        (math.inf, "infinity"),
        (-math.inf, "-infinity"),
    ],
)
def test_numbers(value, text):
    assert wording.number(value) == text


def test_counts_and_sentences():
    assert wording.count(1, "step") == "1 step"
    assert wording.count(1200, "step") == "1,200 steps"
    assert wording.percent(0.683) == "68 %"
    assert wording.sentences("One.", "", "Two.") == "One. Two."
