"""Ranks whose optimizer has no gradient any more."""

import numpy as np
import pytest

from rankscope.server.detectors.update.lost_gradients import WithoutGradients
from tests.support.runs.traces import Trace

STEPS = 120
CUTS = pytest.mark.parametrize(
    "cuts", [(), range(0, STEPS, 7), range(STEPS)], ids=["one", "many", "each"]
)


def found(cuts, *, gone, until=(STEPS, STEPS), frozen=(), since=0):
    """Findings of two ranks that lose their gradients, and that end, at these steps."""
    each, ends = np.arange(STEPS), np.array(until)[:, None]
    with_some = each < np.array(gone)[:, None]
    series = {"update_ratio": 1e-3 * with_some, "grad_norm": np.ones((2, STEPS))}
    present = {"update_ratio": each < ends, "grad_norm": with_some & (each < ends)}
    follower, findings = WithoutGradients(), []
    for window in Trace("lost", 0, each, series, present).windows(cuts):
        follower.take(window, frozen, since)
        findings = follower.findings(window)
    return [(finding.ranks, finding.first_step) for finding in findings]


@CUTS
def test_the_one_that_has_none_is_named(cuts):
    assert found(cuts, gone=(STEPS, 40)) == [((1,), 40)]


@CUTS
def test_all_of_them_are_not(cuts):
    assert found(cuts, gone=(40, 40)) == [((), 40)]


@CUTS
def test_what_is_frozen_asks_for_none(cuts):
    assert found(cuts, gone=(STEPS, 40), frozen=(1,), since=40) == []
    # It had none long before.
    assert found((), gone=(STEPS, 40), frozen=(1,), since=110) == [((1,), 40)]
