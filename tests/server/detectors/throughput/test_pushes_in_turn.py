"""The time from one push to the next one of an asynchronous parameter server, whose workers take
turns."""

import numpy as np
import pytest

from rankscope.server.detectors.throughput.dropped import ThroughputDropped
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 300


def reported(*, pushes, slower_from=STEPS):
    """Three workers push one after the other, and then compute at the same time."""
    random = np.random.default_rng(0)
    turn = np.where(np.arange(STEPS) % 3 == 0, 0.05, 0.004)
    turn = np.where(np.arange(STEPS) < 100, 0.02, turn) * np.where(
        np.arange(STEPS) < slower_from, 1, 20
    )
    seconds = (turn * np.exp(0.05 * random.standard_normal(STEPS)))[None, :]
    series = {"step_seconds": seconds}
    if pushes:
        series |= {
            "push_worker": (np.arange(STEPS) % 3)[None, :] + 1.0,
            "push_staleness": np.full((1, STEPS), 2.0),
        }
    found = judge(Trace("turns", 0, np.arange(STEPS), series), [ThroughputDropped()])
    return [(alert.title, alert.first_step, alert.severity) for alert in found.alerts]


def test_their_rhythm_is_none_of_the_loop():
    assert reported(pushes=True) == []
    # The same lengths of synchronous steps are.
    [(title, _, _)] = reported(pushes=False)
    assert title.startswith("Of every 3 steps 1 takes")


def test_pushes_that_take_longer_from_some_version_on_are_found():
    [(_, first_step, severity)] = reported(pushes=True, slower_from=200)
    assert severity == "info"
    assert first_step == pytest.approx(200, abs=3)
