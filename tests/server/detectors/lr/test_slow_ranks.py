"""Ranks that hold a part of a model and hardly train it."""

import numpy as np
import pytest

from rankscope.server.detectors.lr.slow_ranks import SlowRanks
from tests.support.runs.traces import Trace

STEPS = 120
CUTS = pytest.mark.parametrize(
    "cuts", [(), range(0, STEPS, 7), range(STEPS)], ids=["one", "many", "each"]
)


def found(rates, updates, cuts, *, present=None):
    """Findings of ranks with these rates and updates, [R] or [R, N] each."""
    random = np.random.default_rng(3)
    shape = (len(rates), STEPS)
    wide = [
        np.broadcast_to(np.array(v, float).reshape(len(v), -1), shape) for v in (rates, updates)
    ]
    series = {"lr": wide[0], "update_ratio": wide[1] * np.exp(0.3 * random.standard_normal(shape))}
    slow, findings = SlowRanks(), []
    for window in Trace("rates", 0, np.arange(STEPS), series, present or {}).windows(cuts):
        slow.take(window)
        findings = slow.findings(window)
    return findings


@CUTS
@pytest.mark.parametrize(
    ("rates", "updates", "who"),
    [
        ((2e-5, 0.02), (4e-6, 3e-3), (0,)),
        ((0.02, 0.02, 2e-5, 0.02), (3e-3, 2e-3, 4e-6, 1e-3), (2,)),
        # Rates that are graded from layer to layer, and of pretrained layers.
        ((6e-4, 0.02), (3e-5, 3e-3), ()),
        ((2e-4, 0.02), (3e-5, 3e-3), ()),
        # Steps that are small by large weights, at the same rate.
        ((0.02, 0.02), (4e-6, 3e-3), ()),
        # Another optimizer, of which another rate is usual.
        ((1e-4, 0.1), (2e-3, 3e-3), ()),
        ((0.02,), (4e-6,), ()),
    ],
)
def test_who_hardly_trains(rates, updates, who, cuts):
    findings = found(rates, updates, cuts)
    assert [finding.ranks for finding in findings] == ([who] if who else [])
    for finding in findings:
        assert (finding.severity, finding.first_step) == ("warning", 0)
        assert finding.evidence["lr_of_others"] == 0.02


@CUTS
def test_since_when(cuts):
    rates, updates = np.full((2, STEPS), 0.02), np.full((2, STEPS), 3e-3)
    rates[1, 40:], updates[1, 40:] = 2e-5, 3e-6
    [finding] = found(rates, updates, cuts)
    assert (finding.ranks, finding.first_step) == ((1,), 40)


@CUTS
def test_a_part_that_is_warmed_up_later(cuts):
    rates, updates = np.full((2, STEPS), 0.02), np.full((2, STEPS), 3e-3)
    rates[1, :50], updates[1, :50] = 2e-5, 3e-6
    assert found(rates, updates, cuts) == []


@CUTS
def test_a_rate_that_is_posted_once(cuts):
    there = np.zeros((2, STEPS), bool)
    there[:, 0] = True
    assert found((2e-5, 0.02), (4e-6, 3e-3), cuts, present={"lr": there})[0].ranks == (0,)


@CUTS
def test_ranks_that_are_sampled_at_steps_of_their_own(cuts):
    there = np.zeros((2, STEPS), bool)
    there[0, ::1], there[1, ::2] = True, True
    present = {"update_ratio": there}
    assert found((2e-5, 0.02), (4e-6, 3e-3), cuts, present=present)[0].ranks == (0,)
