"""An accuracy that does not follow the loss, and scores that fall."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.accuracy.falling import FallingPolicy, Scores
from rankscope.server.detectors.accuracy.loss_and_accuracy import Course
from rankscope.server.detectors.base import Detector, Finding, Outcome, Reach
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.recurrence import Folds, detrended, folded
from rankscope.server.detectors.mechanisms.series_by_step import median, noise_of_mean, together
from rankscope.server.detectors.mechanisms.statistics import BLOCK
from rankscope.server.detectors.mechanisms.waiting import GRACE
from rankscope.server.detectors.mechanisms.wording import listing, number, percent
from rankscope.server.detectors.policy import Blocks, Observations, Share, Sigmas, Steps, Times
from rankscope.server.window import Check, Window

_PAIR = ("loss", "accuracy")
# First observations before an accuracy may have risen: easy answers are learned in a few steps.
_FEW = (3, 10)
# Shares of the deviance explained that show how a run began.
_FIRST_SHARES = 10


@dataclass(frozen=True, slots=True)
class StalledPolicy(FallingPolicy):
    """Thresholds of `accuracy.stalled`; a block is 10 observations.

    Attributes:
        min_fall: fall of the loss that counts, as a share of the loss at the start.
        min_trend: Mann-Kendall Z that the fall of the loss has to reach.
        flat: change of the accuracy from the first half to the second up to which it stands still,
            or more where `min_error` allows it.
        gain: rise of the accuracy since the start up to which nothing was gained, or more where
            `gain_error` allows it.
        high: accuracy from which on nothing is left to gain.
        explained: share of the deviance explained, from which on the answers follow the inputs: an
            accuracy that stays is then the data's ceiling, or that of what was loaded.
        answered: the same with which most answers are right: of ten classes it leaves a loss of
            0.58, with which five of six are at least (a wrong one costs ln 2).
        wrong: accuracy below which that is not what was counted: less than those five of six.
        known: accuracy above which it is none of whole sequences: of those it is 0 at first, and
            rises with that of their parts.
        apart: by how much the answers that were counted where the loss is computed are more often
            right than those of the accuracy that is logged.
        changing: share of the steps at which an accuracy changes, that is no older evaluation's.
        clearly: times that wrong answers would have to cost more than the loss is, each ln 2 or
            more: what an accuracy of short sequences counts as wrong for one wrong token.
        some: share of the deviance explained, below which the answers follow the inputs so little
            that an accuracy that rose at the first steps is that of the most frequent class.
        unlike: difference of the accuracies of two places of a period, from which on it says why:
            batches of one source differ by a tenth where they have 32 samples.
        min_error: standard errors of the difference between the halves that count as no change.
        gain_error: standard errors of the rise since the start that count as no gain.
        blocks: number of most recent blocks that are judged.
        soon: the same of an accuracy of something else, for the first time.
        first: number of observations at the start that are averaged.
        small_update: update, relative to the parameters, below which training is slow whatever its
            data; a tenth of the usual.
        calm: steps without it after which it is over.
    """

    min_fall: Share = 0.05
    min_trend: Sigmas = 3.0
    flat: Share = 0.005
    gain: Share = 0.05
    high: Share = 0.97
    explained: Share = 0.5
    answered: Share = 0.75
    wrong: Share = 0.8
    known: Share = 0.03
    apart: Share = 0.3
    changing: Share = 0.5
    clearly: Times = 4.0
    some: Share = 0.1
    unlike: Share = 0.2
    min_error: Sigmas = 2.0
    gain_error: Sigmas = 3.0
    blocks: Blocks = 20
    soon: Blocks = 12
    first: Observations = 50
    small_update: Share = 3e-4
    calm: Steps = 60


@dataclass(frozen=True, slots=True)
class Turns:
    """A period of the accuracy, in observations, with the lowest and the highest of its places."""

    period: int
    low: float
    high: float


@dataclass(slots=True)
class Stuck:
    """What was seen."""

    accuracy: float
    at_start: float
    error: float
    loss_before: float
    loss_after: float
    update: float
    rate: float
    turns: Turns | None = None
    explained: float = math.nan  # where answers became right by the loss, and not by the accuracy
    counted: float = math.nan  # accuracy of what the loss is computed from, where that is known


@dataclass(slots=True)
class StalledState:
    """What `accuracy.stalled` remembers.

    Attributes:
        first_shares: of the deviance explained, in the beginning.
        counted: the latest accuracies of what the loss is computed from, beside those logged.
        turns: by the length of the window, what its newest one showed.
    """

    course: Course
    watch: Watch[Stuck]
    scores: Scores
    seen: set[str] = field(default_factory=set)
    observed: int = 0
    updates: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    shares: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    first_shares: list[float] = field(default_factory=list)
    counted: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    rate: float = math.nan
    folds: Folds = field(default_factory=Folds)
    turns: dict[int, Turns] = field(default_factory=dict)


class AccuracyStalled(Detector[StalledState]):
    """The loss falls and the accuracy has not moved since the start, or a logged score falls.

    Statistic:
        Over 200 observations of both, examined every 10: the medians of 20 blocks of the loss fall
        by more than 5 % of its start (first four against last four; Mann-Kendall Z below -3), while
        the means of the accuracy's two halves differ by less than twice the standard error of their
        difference (or 0.005), and the later one is no better than the first 50 observations by more
        than 3 standard errors (or 0.05). The standard error is that of neighbouring differences
        (von Neumann 1941). An accuracy above 0.97 has nothing to gain, nor has one of answers that
        explain half of the deviance; unless they explain 0.75 of it, and did not at first, at an
        accuracy below 0.8 (that is above 0.03, or that the loss is too low for): then it is an
        accuracy of something else. So it is where the answers that the loss is given are right
        (`accuracy_counted`) by 0.3 more often. Such ones are told after 120 observations. An
        accuracy that has risen and then stays is no fault of this kind: data have their ceilings,
        and mixed labels have low ones. It may have risen within those 50, from the first 3 or 10
        (by 3 standard errors and 0.05), where the answers explain a tenth of the deviance, or
        nothing is known of that. Nor is it one where the loss had been as low before the 200: what
        a restart of the learning rate has raised falls again. Where the accuracy has a period (as
        `loss.oscillating` finds shapes that repeat) within which it differs by 0.2, the cause says
        so. Over once the accuracy moves, whatever the loss does then. Scores: of 120 observations
        or more, examined after each tenth more and 3 times in a row, of a series that the user logs
        and whose name says that higher is better (reward, return, score, f1 ...), the mean of the
        last three quarters lies 5 standard errors and 5 % below that of the first 10, 20, 40 or 80,
        each third of them has lost half of that, and the last third does not rise; no other score
        has risen. Or, of 80 or more, the last 3 blocks of 10 (or of a 64th part) all lie below its
        first one and a tenth of what had been gained, by 6 standard errors of a block and the root
        of the blocks that the fall took, after it had risen by 6: what a score had gained is lost,
        and it is dated when it left the best. The standard error is by the autocorrelation at lag
        1, or by the means of as many observations where that is more.

        A score of answers (accuracy, F1, IoU, recall ...) that the user logs is also reported where
        it has been one and the same number, of 0.5 or less, at all observations, or has come to be
        0, at 8 of them or more, over 160 steps or more. Of evaluations that lie 10 steps or more
        apart and began within 50 steps, a score that falls from the first of 8 on (Mann-Kendall Z
        of -3 or less by a quarter, or of -4 by 5 %), or a score of answers that is 0.3 or less and
        within 0.03 (a seventh of itself) at 10 or more, while the loss loses half of its start. And
        a reward or return that after 200 observations has risen by no more than 0.75 of the scatter
        of single ones (a line through all, and two standard errors), with a mean other than 0, and
        has not gone up and down meanwhile.

    Severity:
        Warning.

    Evidence:
        `accuracy`, `accuracy_at_start`, `standard_error`, `loss_before`, `loss_after`, and where
        they are posted `update_ratio` and `lr`. Of a score `series`, `before`, `after`,
        `standard_error`; of one that never changes `series`, `value`, `observed`; of one that has
        lost what it had gained `start`, `best` and `now`; of one that sinks `first`, `last` and
        `observed`; of one that does not move `mean` and `observed`. Where the accuracy has a
        period, that and `lowest` and `highest` of the places within it.

    Source:
        TheDeepChecker's correlation of loss and accuracy, made directional. Found on every seed of
        an unbalanced problem with too small a rate, and on no healthy run of the corpus.
    """

    kinds = ("accuracy.stalled",)
    of_one_task = True
    wants = (
        *("loss", "accuracy", "lr", "update_ratio", "explained_deviance", "accuracy_counted"),
        "*",
    )

    policy: StalledPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """The accuracy has to move, or nothing shows that it can."""
        return (Reach(("accuracy",), moves="at all"), Reach(("loss",), moves="at all"))

    def start(self) -> StalledState:
        """Nothing seen yet."""
        policy = self.policy
        course = Course(policy.blocks, policy.first, policy.soon)
        return StalledState(course, Watch(policy.calm), Scores(policy.calm))

    def advance(self, window: Window, state: StalledState) -> Outcome:
        """Takes loss and accuracy where both are known, and the scores that a user logs."""
        state.observed += len(window.steps)
        state.seen |= {n for n in _PAIR if n in window.series and window.series[n].present.any()}
        state.scores.take(window, self.policy)
        kept_of = {
            "update_ratio": state.updates,
            "explained_deviance": state.shares,
            "accuracy_counted": state.counted,
        }
        for step, row in together(window, *_PAIR, "lr", *kept_of):
            state.rate = row.get("lr", state.rate)
            for name, kept in kept_of.items():
                if math.isfinite(row.get(name, math.nan)):
                    kept.append(row[name])
            if len(state.first_shares) < _FIRST_SHARES:
                state.first_shares = list(state.shares)
            if math.isfinite(row.get("accuracy", math.nan)):
                self._fold(step, row["accuracy"], state)
            if state.course.push(step, row):
                self._judge(step, state)
        findings = [_finding(e, self.policy) for e in state.watch.take(window.last_step)]
        findings += state.scores.findings(window.last_step)
        return Outcome({"accuracy.stalled": _check(state)}, tuple(findings))

    def _fold(self, step: int, accuracy: float, state: StalledState) -> None:
        """Whether some places of a period are answered far better than others."""
        for size in state.folds.push(step, accuracy):
            _, values = state.folds.window(size)
            found = folded(detrended(size) @ values)
            state.turns.pop(size, None)
            if found is not None and float(np.ptp(found.profile)) > self.policy.unlike:
                level = float(values.mean())
                low, high = level + found.profile.min(), level + found.profile.max()
                state.turns[size] = Turns(found.length, float(low), float(high))

    def _judge(self, step: int, state: StalledState) -> None:
        policy = self.policy
        fallen = state.course.fall(policy.min_fall, policy.min_trend)
        early, late, error = state.course.halves()
        at_start = float(np.mean(state.course.first))
        start_error = math.hypot(error, noise_of_mean(state.course.first))
        explained = median(state.shares)
        other = self._of_something_else(late, state)
        if state.counted and late < policy.wrong and not other:
            explained = math.nan  # that of these answers is another head's, or leaves targets out
        stuck = (
            abs(late - early) < max(policy.min_error * error, policy.flat)
            and late - at_start <= max(policy.gain_error * start_error, policy.gain)
            and late < policy.high
            and (other or not explained > policy.explained)
            and (other or explained < policy.some or not self._rose_at_first(late, error, state))
        )
        known = state.watch.open(step)
        if fallen is None and known is not None:
            # The loss has come to rest, and the accuracy is where it was.
            fallen = known.facts.loss_before, known.facts.loss_after
        if fallen is None or not stuck or not (other or state.course.whole):
            state.watch.good(step)
            return
        update = median(state.updates)
        facts = Stuck(late, at_start, error, *fallen, update, state.rate)
        facts.turns = next(iter(state.turns.values()), None)
        facts.explained = explained if other and not state.counted else math.nan
        facts.counted = median(state.counted) if other else math.nan
        episode = state.watch.bad(step, facts, first_step=state.course.first_step)
        episode.facts = facts

    def _of_something_else(self, late: float, state: StalledState) -> bool:
        """Whether what the loss is computed from is answered right, and was not at first."""
        policy = self.policy
        if state.counted:
            # Of whole sequences the accuracy is 0 for long; one that only changes now and then is
            # that of the last evaluation.
            changes = state.course.changes()
            apart = median(state.counted) - late > policy.apart
            return apart and late > policy.known and changes > policy.changing
        right = late < policy.wrong and median(state.shares) > policy.answered
        right &= median(state.first_shares) < policy.explained
        # A wrong answer costs ln 2 at least, in cross entropy: so many there can be.
        costs = policy.clearly * state.course.latest()
        return right and (late > policy.known or costs < (1 - late) * math.log(2))

    def _rose_at_first(self, late: float, error: float, state: StalledState) -> bool:
        """Whether it was lower at the first few steps: it has come to its ceiling since."""
        policy, first = self.policy, state.course.first
        scatter = noise_of_mean(first) * math.sqrt(len(first))
        return any(
            late - float(np.mean(first[:few]))
            > max(policy.gain_error * math.hypot(error, scatter / math.sqrt(few)), policy.gain)
            for few in _FEW
        )


def _check(state: StalledState) -> Check:
    missing = [name for name in _PAIR if name not in state.seen]
    if missing and state.observed >= GRACE:
        return Check.missing(f"No rank posts {listing(missing)}.")
    have, need = len(state.course.recent), state.course.blocks * BLOCK
    if not state.course.whole:
        return Check.insufficient(f"{have} of {need} steps with a loss and an accuracy.")
    _, late, _ = state.course.halves()
    began = float(np.mean(state.course.first))
    return Check.ok(f"The accuracy began at {number(began)} and has come to {number(late)}.")


def _finding(episode: Episode[Stuck], policy: StalledPolicy) -> Finding:
    facts = episode.facts
    evidence = {
        "accuracy": facts.accuracy,
        "accuracy_at_start": facts.at_start,
        "standard_error": facts.error,
        "loss_before": facts.loss_before,
        "loss_after": facts.loss_after,
    }
    if math.isfinite(facts.rate):
        evidence["lr"] = facts.rate
    if math.isfinite(facts.update):
        evidence["update_ratio"] = facts.update
    share = percent(facts.accuracy)
    turns = facts.turns
    if turns is not None:
        evidence |= {"period": turns.period, "lowest": turns.low, "highest": turns.high}
        cause = (
            f"The accuracy has a period of {turns.period} steps: it is {percent(turns.low)} at one "
            f"place of it and up to {percent(turns.high)} at others. Sources that take turns are "
            "answered unlike each other: the targets of one do not belong to its inputs, are "
            "numbered otherwise, or it is far harder; what the others teach it takes back."
        )
        remedy = (
            "Evaluate each source, file or loader worker by itself, and compare targets and inputs "
            "of the one with the low accuracy with those of the others."
        )
    elif math.isfinite(facts.explained) or math.isfinite(facts.counted):
        right = f"they explain {percent(facts.explained)} of the targets' deviance"
        if math.isfinite(facts.explained):
            evidence["explained_deviance"] = facts.explained
        if math.isfinite(facts.counted):
            evidence["accuracy_counted"] = facts.counted
            right = f"of those that the loss is given {percent(facts.counted)} are right"
        cause = (
            f"By the loss the answers have become right since the start: {right}. The accuracy is "
            "not computed from what the loss is computed from: other outputs (a head that nothing "
            "trains), another axis or threshold, other labels or other samples; the loss leaves "
            "most targets out (a mask, weights of classes); or it counts whole sequences of which "
            "one token is wrong."
        )
        remedy = (
            "Compute the accuracy of one batch by hand, from the outputs and targets that the loss "
            "is given. What was selected by this accuracy (checkpoints, early stopping) was "
            "selected by chance."
        )
    elif facts.update < policy.small_update:
        cause = (
            f"The steps are small: each changes the parameters by {number(facts.update)} of their "
            "size, a tenth of the usual or less. The loss shrinks without any answer changing, as "
            f"when the model says the most frequent class of all samples ({share} are right)."
        )
        factor = min(max(1e-3 / facts.update, 3.0), 30.0) if facts.update > 0 else 10.0
        rate = (
            f" from {number(facts.rate)} to {number(facts.rate * factor)}"
            if math.isfinite(facts.rate)
            else f" {factor:.0f}-fold"
        )
        remedy = (
            f"Raise the learning rate{rate}. If {share} is the share of the most frequent class, "
            "weight the classes in the loss."
        )
    else:
        cause = (
            "The model's answers become more confident, not more often right. Most likely it "
            f"gives one answer to all samples, as of the most frequent class ({share} are right); "
            "or the accuracy is not computed from what the loss is computed from (another axis, "
            "another threshold, other labels)."
        )
        remedy = (
            f"Compare {share} with the share of the most frequent class. If they agree, weight the "
            "classes in the loss or balance the batches; if not, compute the accuracy of one batch "
            "by hand."
        )
    return episode.finding(
        kind="accuracy.stalled",
        severity="warning",
        title=(
            f"The accuracy stays at {share} since step {episode.first_step} while the loss falls "
            f"from {number(facts.loss_before)} to {number(facts.loss_after)}"
        ),
        cause=cause,
        remedy=remedy,
        evidence=evidence,
    )
