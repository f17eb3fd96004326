"""An accuracy at a low ceiling, as of mixed labels, under restarts of the learning rate."""

import numpy as np
import pytest

from rankscope.server.detectors.accuracy.stalled import AccuracyStalled
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS, PERIOD = 800, 200


def alerts(loss, accuracy, *, seed=0, explained=None, cuts=()):
    """Of two ranks; both courses are float [STEPS]."""
    random = np.random.default_rng(seed)
    shape = (2, STEPS)
    series = {
        "loss": loss + 0.02 * random.standard_normal(shape),
        "accuracy": accuracy + 0.06 * random.standard_normal(shape),
    }
    if explained is not None:
        series["explained_deviance"] = explained + 0.02 * random.standard_normal(shape)
    trace = Trace("restarts", seed, np.arange(STEPS), series)
    return judge(trace, [AccuracyStalled()], cuts).alerts


def cycles():
    """A loss that each restart raises, and that each cycle takes to where it was before."""
    return 0.5 + 0.1 * (1 - np.arange(STEPS) % PERIOD / PERIOD)


def rising(steps):
    """An accuracy that begins at chance and comes to 0.72 within some steps."""
    return 0.72 - 0.22 * np.maximum(1 - np.arange(STEPS) / steps, 0.0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cuts", [(), range(0, STEPS, 33)])
def test_a_fall_that_takes_back_a_rise_is_no_progress_that_an_accuracy_lacks(seed, cuts):
    loss = np.where(np.arange(STEPS) < PERIOD, 0.5, cycles())
    assert not alerts(loss, np.full(STEPS, 0.72), seed=seed, cuts=cuts)


def test_one_that_goes_below_what_was_before_is():
    loss = np.where(np.arange(STEPS) < PERIOD, 0.6, cycles())
    (found,) = alerts(loss, np.full(STEPS, 0.6))
    assert found.severity == "warning"
    assert 50 < found.first_step <= PERIOD  # the window begins before it


@pytest.mark.parametrize("steps", [4, 12, 25])
@pytest.mark.parametrize("explained", [None, 0.3])
def test_an_accuracy_that_rises_within_the_first_steps_has_risen(steps, explained):
    assert not alerts(cycles(), rising(steps), explained=explained)


def test_it_has_not_where_the_answers_are_one_and_the_same():
    assert len(alerts(cycles(), rising(12), explained=0.0)) == 1


def test_an_accuracy_that_never_rose_has_not():
    assert len(alerts(cycles(), np.full(STEPS, 0.72), explained=0.3)) == 1
