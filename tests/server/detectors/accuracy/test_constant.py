"""Scores of answers that are one and the same number, and such as only seem to be."""

import numpy as np
import pytest

from rankscope.server.detectors.accuracy.stalled import AccuracyStalled
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 400
EACH = np.arange(STEPS)


def alerts(name, scores, *, every=20, falls=True, cuts=()):
    loss = 2 * np.exp(-EACH / 80) if falls else np.full(STEPS, 2.0)
    series = {"loss": np.tile(loss, (2, 1)), name: np.tile(scores, (2, 1))}
    there = np.tile(EACH % every == 5 % every, (2, 1))
    trace = Trace("scores", 0, EACH, series, {name: there})
    return judge(trace, [AccuracyStalled()], cuts).alerts


@pytest.mark.parametrize("cuts", [(), range(0, STEPS, 7)], ids=["one", "many"])
@pytest.mark.parametrize("name", ["val/iou", "valAcc", "mean_IoU"])
def test_one_that_never_changes(name, cuts):
    (alert,) = alerts(name, np.zeros(STEPS), cuts=cuts)
    assert (alert.severity, alert.first_step) == ("warning", 5)


def test_one_that_has_come_to_be_zero():
    (alert,) = alerts("iou", np.where(EACH < 100, 0.2 + EACH / 1000, 0.0))
    assert alert.first_step == 105


@pytest.mark.parametrize(
    ("name", "scores", "more"),
    [
        # What is logged at each step is the last evaluation's.
        ("best_acc", np.where(EACH < 300, 0.0, 0.5), {"every": 1}),
        ("val/acc", np.where(EACH < 300, 0.1, 0.5), {"every": 1}),
        ("iou_threshold", np.full(STEPS, 0.5), {}),
        # Single batches that hold none of a rare class.
        ("train/recall", np.where(EACH % 100 == 65, 1.0, 0.0), {}),
        ("val/f1", np.zeros(STEPS), {"falls": False}),
        ("val/f1", np.where(EACH < 150, 0.0, EACH / 500), {}),
    ],
)
def test_what_only_seems_to_be(name, scores, more):
    assert not alerts(name, scores, **more)
