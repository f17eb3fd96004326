"""Who is compared with whom where no group of equal ranks is the largest."""

import numpy as np
import pytest

from rankscope.server.comparison.reference import without_suspects
from rankscope.server.window import Comparison


def compared(clusters, distance, *, decided=False):
    distance = np.array(distance, np.float64)
    ranks = np.arange(len(clusters))
    labels = np.array(clusters, np.int64)
    return Comparison(7, "parameters", ranks, labels, distance, distance / 10, decided)


@pytest.mark.parametrize(
    ("clusters", "distance", "suspects", "expected", "measured"),
    [
        # The lowest rank had been taken as the reference, and is the one at fault.
        ([0, 1], [0.0, 2.0], [0], [1, 0], [2.0, 0.0]),
        ([0, 1], [0.0, 2.0], [1], [0, 1], [0.0, 2.0]),
        ([0, 0, 1, 1], [0.0, 0.0, 2.0, 2.0], [0, 1], [1, 1, 0, 0], [2.0, 2.0, 0.0, 0.0]),
        # Three groups: how far two of them are from the third was measured from one of them alone.
        ([0, 1, 2, 2], [0.0, 5.0, 3.0, 3.0], [0, 1], [1, 2, 0, 0], [3.0, np.nan, 0.0, 0.0]),
        # The sizes were not sampled.
        ([0, 1], [0.0, np.nan], [0], [1, 0], [np.nan, 0.0]),
    ],
)
def test_those_that_are_blamed_differ_from_the_others(
    clusters, distance, suspects, expected, measured
):
    found = without_suspects(compared(clusters, distance), suspects)
    assert found.decided
    assert found.clusters.tolist() == expected
    np.testing.assert_array_equal(found.distance, measured)
    np.testing.assert_array_equal(found.relative, np.array(measured) / 10)
    assert found.deviating == tuple(sorted(suspects))


@pytest.mark.parametrize(
    ("clusters", "suspects", "decided"),
    [
        ([0, 1], [], False),
        ([0, 1], [0, 1], False),
        ([0, 1], [5], False),
        # The one that is blamed holds what one that is not blamed holds.
        ([0, 0, 1, 1], [0], False),
        # The others hold three different things.
        ([0, 1, 2, 3], [3], False),
        ([0, 0, 1], [0, 1], True),
    ],
)
def test_what_blame_does_not_settle_stays_as_it_is(clusters, suspects, decided):
    before = compared(clusters, [0.0] + [1.0] * (len(clusters) - 1), decided=decided)
    assert without_suspects(before, suspects) is before
