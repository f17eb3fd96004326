"""Steps that take longer because the machine has ever more to do."""

import numpy as np
import pytest

from rankscope.server.detectors.throughput.dropped import ThroughputDropped
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 300


def alerts(*, queued, works, at=100, seed=0):
    """A rank whose steps wait for a processor, and then compute: seconds before and from `at`."""
    random = np.random.default_rng(seed)
    later, shape = np.arange(STEPS) >= at, (2, STEPS)
    waits, computes = (
        np.where(later, now, before) * np.exp(0.1 * random.standard_normal(shape))
        for before, now in (queued, works)
    )
    series = {"step_seconds": waits + computes, "queued_seconds": waits}
    return judge(Trace("overloaded", seed, np.arange(STEPS), series), [ThroughputDropped()]).alerts


@pytest.mark.parametrize("queued", [(0.05, 0.18), (0.009, 0.017), (0.0, 0.1)])
def test_a_machine_that_has_ever_more_to_do(queued):
    """Also where most of a step was waiting before: what is left of it says nothing."""
    works = 0.6 * queued[0] + 0.005
    assert not alerts(queued=queued, works=(works, 1.5 * works))


def test_more_work_on_a_machine_that_others_use_a_little():
    (alert,) = alerts(queued=(0.002, 0.004), works=(0.02, 0.05))
    assert alert.first_step == pytest.approx(100, abs=2)


def test_that_nothing_could_be_judged_is_said_to_be_the_machine():
    series = {"step_seconds": np.full((2, STEPS), 0.1), "queued_seconds": np.full((2, STEPS), 0.09)}
    found = judge(Trace("overloaded", 0, np.arange(STEPS), series), [ThroughputDropped()])
    check = found.checks["throughput.dropped"]
    assert check.status == "insufficient_data"
    assert check.why.startswith("Of 300 steps with their length 0 of 53 can be judged: ")
