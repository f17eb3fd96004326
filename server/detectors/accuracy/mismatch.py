"""A loss and an accuracy that do not speak of the same thing."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.accuracy.loss_and_accuracy import Course
from rankscope.server.detectors.base import Detector, Finding, Outcome, Reach
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.series_by_step import together
from rankscope.server.detectors.mechanisms.statistics import BLOCK, mann_kendall
from rankscope.server.detectors.mechanisms.wording import count, number, percent
from rankscope.server.detectors.policy import Policy, Share, Sigmas
from rankscope.server.window import Check, Window

# Blocks that are judged at a time.
_BLOCKS = 20


@dataclass(frozen=True, slots=True)
class MismatchPolicy(Policy):
    """Thresholds of `accuracy.mismatch`.

    Attributes:
        min_fall: fall of the loss that counts, as a share of the loss at the start.
        min_trend: Mann-Kendall Z that the falls of loss and accuracy have to reach.
        min_drop: smallest fall of the accuracy from the first half to the second that counts.
        min_error: smallest such fall in standard errors.
    """

    min_fall: Share = 0.05
    min_trend: Sigmas = 3.0
    min_drop: Share = 0.02
    min_error: Sigmas = 3.0


@dataclass(slots=True)
class Disagreement:
    """What was seen: both, of the first and of the last blocks."""

    accuracy_before: float
    accuracy_after: float
    loss_before: float
    loss_after: float


@dataclass(slots=True)
class MismatchState:
    """What `accuracy.mismatch` remembers."""

    course: Course = field(default_factory=lambda: Course(_BLOCKS))
    watch: Watch[Disagreement] = field(default_factory=lambda: Watch(clear_after=60))


class AccuracyMismatch(Detector[MismatchState]):
    """The loss falls, and the accuracy falls with it.

    What gets better for the loss gets worse for the answers: the two are computed from different
    labels, of different outputs, or one of them with the wrong sign.

    Statistic:
        Over 200 observations of both, examined every 10: the medians of 20 blocks of the loss
        fall by more than 5 % of its start (first four against last four), those of the accuracy
        from one half to the other by more than 0.02 and 3 standard errors of their difference
        (neighbouring differences, von Neumann 1941), both steadily (Mann-Kendall Z below -3).

    Severity:
        Warning.

    Evidence:
        `accuracy_before`, `accuracy_after`, `loss_before`, `loss_after`.

    Source:
        TheDeepChecker's correlation of loss and accuracy, made directional. That the loss of an
        evaluation rises while its accuracy rises, too, is no fault: `generalization.gap` reports
        it.
    """

    kinds = ("accuracy.mismatch",)
    of_one_task = True
    needs = ("loss", "accuracy")

    policy: MismatchPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """The accuracy has to move, or nothing shows that it can."""
        return (Reach(("accuracy",), moves="at all"), Reach(("loss",), moves="at all"))

    def advance(self, window: Window, state: MismatchState) -> Outcome:
        """Takes loss and accuracy where both are known."""
        for step, row in together(window, *self.needs):
            if state.course.push(step, row):
                self._judge(step, state)
        findings = tuple(_finding(e) for e in state.watch.take(window.last_step))
        return Outcome({"accuracy.mismatch": _check(state)}, findings)

    def _judge(self, step: int, state: MismatchState) -> None:
        policy, course = self.policy, state.course
        early, late, error = course.halves()
        drops = early - late > max(policy.min_drop, policy.min_error * error)
        fallen = course.fall(policy.min_fall, policy.min_trend) if drops else None
        right = np.array([accuracy for _, _, accuracy in course.recent])
        right = right.reshape(-1, BLOCK).mean(axis=1)
        if fallen is None or mann_kendall(right) >= -policy.min_trend:
            state.watch.good(step)
            return
        facts = Disagreement(float(right[:4].mean()), float(right[-4:].mean()), *fallen)
        state.watch.bad(step, facts, first_step=course.first_step).facts = facts


def _check(state: MismatchState) -> Check:
    have, need = len(state.course.recent), state.course.needed
    if have < need:
        return Check.insufficient(f"{have} of {need} steps with a loss and an accuracy.")
    checks = count(state.watch.judged, "check")
    return Check.ok(f"At {checks}, loss and accuracy never fell together.")


def _finding(episode: Episode[Disagreement]) -> Finding:
    facts, step = episode.facts, episode.first_step
    was, now = percent(facts.accuracy_before), percent(facts.accuracy_after)
    return episode.finding(
        kind="accuracy.mismatch",
        severity="warning",
        title=f"The accuracy falls from {was} to {now} since step {step}, and so does the loss",
        cause=(
            f"The loss fell from {number(facts.loss_before)} to {number(facts.loss_after)}, so "
            "the model learns; what it learns is not what the accuracy counts. Most likely the "
            "two are given different labels or outputs (another order, another axis, another "
            "threshold), or a penalty term makes up most of the loss, and its fall costs right "
            "answers."
        ),
        remedy=(
            "Compute both by hand for one batch, from the same outputs and labels; where the loss "
            "is a sum, log its parts."
        ),
        evidence={
            "accuracy_before": facts.accuracy_before,
            "accuracy_after": facts.accuracy_after,
            "loss_before": facts.loss_before,
            "loss_after": facts.loss_after,
        },
    )
