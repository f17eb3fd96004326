"""What the runner decides for the detectors."""

import logging
from dataclasses import dataclass, replace

import numpy as np
import pytest

from rankscope.server.detectors.base import Detector, Outcome
from rankscope.server.detectors.mechanisms.waiting import GRACE
from rankscope.server.detectors.policy import Number, Policy
from rankscope.server.detectors.profiles import LOGGED
from rankscope.server.detectors.runner import Evaluation
from rankscope.server.window import Check, Series, Status, Window
from tests.support.incidents import finding

OK = Check(Status.OK, "Fine.")


def window(first, count, *, world_size=2, metrics=("loss",), absent=()):
    shape = (world_size, count)
    series = {m: Series(np.ones(shape), np.ones(shape, bool)) for m in metrics}
    series |= {m: Series(np.zeros(shape), np.zeros(shape, bool)) for m in absent}
    return Window(
        world_size=world_size,
        ranks=np.arange(world_size),
        steps=np.arange(first, first + count),
        series=series,
        last_step=first + count - 1,
    )


class Reports(Detector[list]):
    kinds = ("loss.spike",)
    needs = ("loss",)
    wants = ("lr",)

    def start(self):
        return []

    def advance(self, window, state):
        state += window.steps.tolist()
        found = tuple(finding("loss.spike", step) for step in state if step in (3, 30))
        return Outcome({"loss.spike": OK}, found)


class Compares(Detector[None]):
    kinds = ("rank.loss_outlier", "rank.silent")
    min_ranks = 3

    def start(self):
        return None

    def advance(self, window, state):
        return Outcome(dict.fromkeys(self.kinds, OK), (finding("rank.silent", 1),))


class Fails(Detector[None]):
    kinds = ("loss.nonfinite", "loss.plateau")
    needs = ("accuracy",)

    def start(self):
        return None

    def advance(self, window, state):
        if window.last_step >= 9:
            raise ZeroDivisionError("a fault")
        return Outcome(dict.fromkeys(self.kinds, OK))


def test_what_is_read_of_a_run():
    read = {"loss", "lr", "accuracy", "task", "loss_classes"}
    assert Evaluation([Reports(), Compares(), Fails()]).needs == read | LOGGED | {
        "task",
        "loss_classes",
    }


def test_every_kind_has_an_answer_and_findings_come_by_steps():
    evaluation = Evaluation([Reports(), Compares()])
    findings, checks = evaluation.advance(window(0, 5, world_size=3))
    assert checks == dict.fromkeys(("loss.spike", "rank.loss_outlier", "rank.silent"), OK)
    assert [(f.kind, f.seen_step) for f in findings] == [("rank.silent", 1), ("loss.spike", 3)]


def test_too_few_ranks_are_no_reason_to_pass():
    findings, checks = Evaluation([Compares()]).advance(window(0, 5))
    assert findings == ()
    assert {c.status for c in checks.values()} == {Status.NOT_APPLICABLE}
    assert checks["rank.silent"].why == "It compares at least 3 ranks; this run has 2 ranks."


@pytest.mark.parametrize("absent", [(), ("loss",)])
def test_missing_input(absent):
    evaluation = Evaluation([Reports()])
    _, checks = evaluation.advance(window(0, GRACE - 1, metrics=("lr",), absent=absent))
    assert checks["loss.spike"].status is Status.INSUFFICIENT_DATA
    _, checks = evaluation.advance(window(GRACE - 1, 1, metrics=("lr",), absent=absent))
    assert checks["loss.spike"] == Check(Status.MISSING_INPUT, "No rank posts loss.")
    # It comes after all: what was seen before is known.
    findings, checks = evaluation.advance(window(GRACE, 20))
    assert checks["loss.spike"] is OK
    assert [f.seen_step for f in findings] == [3, 30]


@pytest.mark.parametrize(
    ("needs", "steps", "why"),
    [
        (("loss",), 1, "loss has not been posted in the first step."),
        (("loss", "lr"), 2, "loss and lr have not been posted in the first 2 steps."),
        (("loss", "lr", "x"), 2, "loss, lr and x have not been posted in the first 2 steps."),
    ],
)
def test_how_missing_series_are_reported(needs, steps, why):
    class Needs(Reports):
        pass

    Needs.needs = needs
    _, checks = Evaluation([Needs()]).advance(window(0, steps, metrics=()))
    assert checks["loss.spike"] == Check(Status.INSUFFICIENT_DATA, why)


def test_a_series_that_was_there_once_is_not_missing():
    evaluation = Evaluation([Reports()])
    evaluation.advance(window(0, 1))
    _, checks = evaluation.advance(window(1, 100, metrics=()))
    assert checks["loss.spike"] is OK


def test_a_fault_of_one_detector_is_contained_and_reported_once(caplog):
    evaluation = Evaluation([Fails(), Reports()])
    with caplog.at_level(logging.ERROR):
        for first in range(0, 40, 5):
            findings, checks = evaluation.advance(window(first, 5, metrics=("loss", "accuracy")))
    assert checks["loss.spike"] is OK
    assert [f.seen_step for f in findings] == [3, 30]
    for kind in Fails.kinds:
        assert checks[kind].status is Status.ERROR
        assert "Fails failed at step 9: ZeroDivisionError('a fault')" in checks[kind].why
    assert [r.levelname for r in caplog.records] == ["ERROR"]


def test_strict_raises():
    with pytest.raises(ZeroDivisionError):
        Evaluation([Fails()], strict=True).advance(window(0, 10))


class Foreign(Compares):
    min_ranks = 1
    kinds = ("loss.plateau",)


class Silent(Reports):
    def advance(self, window, state):
        return Outcome({})


@pytest.mark.parametrize(("wrong", "reported"), [(Foreign, "it finds"), (Silent, "it answers for")])
def test_an_answer_that_would_be_lost_is_a_fault(wrong, reported):
    with pytest.raises(ValueError, match=reported):
        Evaluation([wrong()], strict=True).advance(window(0, 10))


def test_time_is_measured_by_a_clock_that_is_handed_in():
    ticks = iter(range(100))
    evaluation = Evaluation([Reports(), Compares()], clock=lambda: float(next(ticks)))
    evaluation.advance(window(0, 5))
    evaluation.advance(window(5, 5))
    assert evaluation.seconds == {"Reports": 2.0, "Compares": 0.0}


# ------------------------------------------------------------------- what is said once for all


def lasting(step, last_step, clear_after):
    return replace(
        finding("loss.spike", step), last_step=last_step, clear_after=clear_after, title="It jumps"
    )


class Lasts(Detector[list]):
    """Reports what it is made with; its own answer is that all is in order."""

    kinds = ("loss.spike",)
    found: tuple = ()

    def advance(self, window, state):
        return Outcome({"loss.spike": OK}, self.found)


@pytest.mark.parametrize(
    ("found", "is_open"),
    [
        ((), False),
        ((lasting(3, 5, 4),), True),  # steps 6 to 9 are within its 4
        ((lasting(3, 4, 4),), False),
        ((lasting(3, 3, None),), True),
        ((lasting(3, 4, 4), replace(lasting(8, 9, 0), key="rank:1")), True),
    ],
)
def test_a_kind_is_open_while_a_finding_of_it_is_not_over(found, is_open):
    detector = Lasts()
    detector.found = found
    _, checks = Evaluation([detector]).advance(window(0, 10))
    assert checks["loss.spike"] == (Check.open("It jumps.") if is_open else OK)


def test_a_detector_may_say_itself_that_a_kind_is_open():
    class Says(Lasts):
        found = (lasting(3, 5, 4),)
        reports_open = True

    _, checks = Evaluation([Says()]).advance(window(0, 10))
    assert checks["loss.spike"] == OK


class Waits(Detector[list]):
    kinds = ("loss.spike",)

    def advance(self, window, state):
        return Outcome({"loss.spike": Check.missing("Nobody posts it.", early="Not yet.")})


def test_what_nobody_posts_is_missing_after_a_while():
    evaluation = Evaluation([Waits()])
    _, checks = evaluation.advance(window(0, GRACE - 1))
    assert checks["loss.spike"] == Check(Status.INSUFFICIENT_DATA, "Not yet.")
    _, checks = evaluation.advance(window(GRACE - 1, 1))
    assert checks["loss.spike"] == Check(Status.MISSING_INPUT, "Nobody posts it.")


@dataclass(frozen=True, slots=True)
class LeastPolicy(Policy):
    """Thresholds.

    Attributes:
        least: smallest value.
    """

    least: Number = 3.0


class Declares(Detector[dict]):
    """Its state and its thresholds are those that it declares."""

    kinds = ("loss.spike",)
    policy: LeastPolicy

    def advance(self, window, state):
        state["seen"] = state.get("seen", 0) + len(window.steps)
        return Outcome({"loss.spike": Check.ok(f"{state['seen']} of {self.policy.least}.")})


def test_state_and_thresholds_are_declared_once():
    assert Declares.policies is LeastPolicy
    first, second = Declares(), Declares()
    assert first.start() == {}
    assert first.start() is not second.start()
    evaluation = Evaluation([first])
    evaluation.advance(window(0, 4))
    _, checks = evaluation.advance(window(4, 4))
    assert checks["loss.spike"].why == "8 of 3.0."
