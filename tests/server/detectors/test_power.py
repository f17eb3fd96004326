"""A detector that found nothing says so only where it has seen enough to find it."""

import numpy as np
import pytest

from rankscope.server.detectors import DETECTORS, build
from rankscope.server.detectors.base import Reach
from rankscope.server.detectors.gradient.accumulating import GradientAccumulating
from rankscope.server.detectors.reach import Recorded
from rankscope.server.window import Status
from tests.support.judging import judge
from tests.support.runs.courses import zeros
from tests.support.runs.traces import Trace

ZERO = zeros(0)


@pytest.mark.parametrize("detector", DETECTORS, ids=lambda d: d.__name__)
def test_each_detector_declares_what_it_has_to_see(detector):
    reaches = detector().reaches()
    assert bool(reaches) is not bool(detector.lasting), "either of the two"
    named = {kind for reach in reaches for kind in reach.kinds or detector.kinds}
    assert not reaches or named == set(detector.kinds)
    wanted = {*detector.needs, *detector.wants}
    for reach in reaches:
        scalars = [n for n in reach.series if not n.startswith(("words/", "layers/"))]
        # What nobody asks for is in no window.
        assert wanted.issuperset({*scalars} - {"reductions"})


@pytest.mark.parametrize(
    "kind",
    [
        "loss.diverging",
        "loss.oscillating",
        "loss.plateau",
        "rank.loss_outlier",
        "accuracy.stalled",
        "accuracy.mismatch",
        "lr.too_low",
        "lr.too_high",
        "update.ratio",
        "update.missing",
        "layer.dead",
        "gradient.exploding",
        "gradient.oscillating",
        "data.outlier",
    ],
)
def test_what_has_been_one_value_from_the_start_is_no_pass(kind):
    found = judge(ZERO, build())
    assert [alert.kind for alert in found.alerts] == ["gradient.vanishing"]
    check = found.checks[kind]
    assert check.status == Status.INSUFFICIENT_DATA, check.why
    assert "changes its sign" not in check.why


def test_a_loss_that_has_fallen_to_zero_is_healthy():
    steps = 400
    loss = np.maximum(2.0 * np.exp(-np.arange(steps) / 20) - 1e-4, 0.0) * np.ones((2, 1))
    norms = loss.copy()
    series = {"loss": loss, "grad_norm": norms, "update_ratio": 1e-2 * norms}
    series["lr"] = np.full((2, steps), 0.1)
    series["accuracy"] = np.where(loss < 0.1, 1.0, 0.5)
    series["tensors_without_gradient"] = np.where(norms > 0, 0.0, 2.0)
    run = Trace("learned", 0, np.arange(steps), series, config={"parameter_tensors": 2})
    found = judge(run, build())
    assert [a.kind for a in found.alerts if a.severity != "info"] == []
    assert found.checks["loss.plateau"].status == Status.OK


def seen_at(steps, *, until, reach):
    """The answer where one digest is recorded at each of some steps of a run."""
    digests = np.zeros((1, until), dtype=np.uint64)
    present = np.zeros((1, until), dtype=bool)
    present[:, list(steps)] = True
    run = Trace("digests", 0, np.arange(until), {"loss": np.ones((1, until))})
    recorded = Recorded(frozenset(reach.series))
    from dataclasses import replace

    from rankscope.server.window import Check, Series

    for window in run.windows(range(0, until, 37)):
        at = np.searchsorted(np.arange(until), window.steps)
        found = {"batch": Series(digests[:, at], present[:, at])}
        recorded.take(replace(window, digests=found))
    return recorded.qualified("data.unshuffled", Check(Status.OK, "Nothing came again."), [reach])


POWERS = [*range(8), *(2**k for k in range(3, 10))]
ORDER = Reach(("words/batch",), 3, returns=True)


@pytest.mark.parametrize(
    ("steps", "until", "seen"),
    [
        (POWERS, 600, False),
        (range(600), 600, True),
        (range(0, 600, 2), 600, True),
        # An epoch is twice as long as what was recorded densely; and one of 300 steps, not.
        ([*range(100), *range(100, 600, 32)], 600, True),
        ([*range(60), *range(60, 600, 32)], 600, False),
        (range(300), 600, True),
        (range(290), 600, False),
        ([0, 1], 3, False),
    ],
)
def test_an_order_is_seen_where_both_times_were_recorded(steps, until, seen):
    check = seen_at(steps, until=until, reach=ORDER)
    assert check.status == (Status.OK if seen else Status.INSUFFICIENT_DATA), check.why


def test_why_an_order_may_have_passed_unseen():
    check = seen_at(POWERS, until=600, reach=ORDER)
    assert check.why == (
        "Nothing came again. But `batch` is recorded at one of 40 steps, and at most at 9 in a "
        "row: what recurs after more steps than these may go unseen."
    )


def test_one_step_does_not_show_whether_gradients_are_carried_on():
    steps = 60
    carried = np.zeros((1, steps))
    there = np.zeros((1, steps), dtype=bool)
    series = {"gradient_carried": carried, "grad_norm": np.ones((1, steps))}
    for seen, status in ((1, Status.INSUFFICIENT_DATA), (2, Status.INSUFFICIENT_DATA)):
        there[:, 20 : 20 + seen] = True
        run = Trace("once", 0, np.arange(steps), series, {"gradient_carried": there})
        found = judge(run, [GradientAccumulating()])
        assert found.checks["gradient.accumulating"].status == status
    there[:, :30] = True
    run = Trace("often", 0, np.arange(steps), series, {"gradient_carried": there})
    found = judge(run, [GradientAccumulating()])
    assert found.checks["gradient.accumulating"].status == Status.OK
