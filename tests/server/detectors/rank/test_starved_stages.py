"""Stages of a pipeline wait for the rank before them, and not for data."""

import numpy as np
import pytest

from rankscope.server.detectors.rank.starved import RankStarved
from tests.support.judging import judge
from tests.support.runs.traces import Trace

RANKS, STEPS = 4, 200
STAGE = np.array([False, False, True, True])


def pipeline(*, received, starved=None, wait=0.02):
    """Ranks of a second stage that wait 20 of 40 ms before their forward pass."""
    random = np.random.default_rng(3)
    data = 0.0015 * random.uniform(0.9, 1.3, (RANKS, STEPS))
    data[STAGE] += wait
    if starved is not None:
        data[starved] += 0.03
        data[STAGE] += 0.03
    step = np.full((RANKS, STEPS), 0.04 + 0.03 * (starved is not None))
    flagged = np.broadcast_to(np.asarray(received)[:, None], (RANKS, STEPS))
    return Trace(
        *("pipeline", 3, np.arange(STEPS)),
        {
            "loss": np.ones((RANKS, STEPS)),
            "step_seconds": step,
            "data_seconds": data,
            "input_received": flagged.astype(float),
        },
        present={"input_received": flagged},
    )


def starving(trace, cuts=()):
    found = judge(trace, [RankStarved()], cuts)
    return [alert.ranks for alert in found.of("rank.starved")]


@pytest.mark.parametrize("cuts", [(), range(0, STEPS, 7)], ids=["one", "many"])
def test_a_later_stage_is_not_starved(cuts):
    assert starving(pipeline(received=STAGE), cuts) == []


def test_the_first_stage_may_be():
    assert starving(pipeline(received=STAGE, starved=1)) == [(1,)]


@pytest.mark.parametrize("received", [True, False])
def test_where_the_gradient_of_all_inputs_is_wanted_they_are_data(received):
    """Losses of derivatives, or perturbed inputs, make no pipeline."""
    assert starving(pipeline(received=[received] * RANKS)) == [(2, 3)]
