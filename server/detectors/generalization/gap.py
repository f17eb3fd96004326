"""An evaluation that becomes worse while training becomes better."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import TO_THE_END, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.generalization.logged_evaluations import (
    LoggedEvaluations,
    accuracy_beside,
    is_logged_evaluation,
)
from rankscope.server.detectors.generalization.no_better import Losses, NoBetter, finding_of
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.epochs_seen import Visits
from rankscope.server.detectors.mechanisms.series_by_step import median, together
from rankscope.server.detectors.mechanisms.statistics import (
    Spacing,
    mann_kendall,
    median_error,
    robust_sigma,
)
from rankscope.server.detectors.mechanisms.waiting import too_few
from rankscope.server.detectors.mechanisms.wording import count, number, percent, sentences
from rankscope.server.detectors.policy import Count, Observations, Policy, Share, Sigmas, Times
from rankscope.server.window import Check, Window

# Loss of the best answer that is the same for all inputs of a batch, and what share that is of that
# for all targets so far: of a few samples of many classes a small one.
_CONSTANT, _SHARE = "target_deviance", "target_share"
# Batches whose median it is: of one it depends on which targets these are. By as many the error is
# an eighth of that of one.
_BATCHES = 64


@dataclass(frozen=True, slots=True)
class GapPolicy(Policy):
    """Thresholds of `generalization.gap`.

    Attributes:
        evaluations: number of evaluations that are needed before anything is judged.
        few: the same where each evaluation since the best is worse than the one before it, of which
            one of 24 orders of four is so: short jobs have no more of them.
        after: number of evaluations after the best one that have to be exceeded.
        last: number of most recent evaluations whose median is judged.
        surer: rise of the accuracy since the best evaluation, from which on the answers are not
            worse but too confident.
        training: number of training losses whose median is taken beside each evaluation, none older
            than so many steps or than the previous evaluation.
        fallen: smallest fall of the training loss since the best evaluation, in standard errors.
        slight: rise of the last evaluations above the best, as a share of the best, from which on
            it is reported.
        rise: the same rise, from which on it is a warning.
        noise: smallest rise as a multiple of the noise of the evaluations.
        progress: smallest rise as a share of what the evaluations had gained.
        trend: smallest Mann-Kendall Z of the evaluations since the best.
    """

    evaluations: Count = 6
    few: Count = 4
    after: Count = 3
    last: Count = 3
    surer: Share = 0.005
    training: Observations = 20
    fallen: Sigmas = 2.0
    slight: Times = 0.05
    rise: Times = 0.15
    noise: Sigmas = 4.0
    progress: Times = 0.05
    trend: Sigmas = 2.0


@dataclass(slots=True)
class Gap:
    """What was seen: losses of the evaluation and of training, at the best and now.

    Attributes:
        highest: of the medians of the last evaluations.
        gained: by the best evaluation over the first, or by training since, where that is more.
        bounded: the loss is known to have 0 as its lower bound, so that its size is a measure.
    """

    best: float
    best_step: int
    now: float
    highest: float
    training_then: float
    training_now: float
    accuracy_then: float
    accuracy_now: float
    gained: float = math.nan
    bounded: bool = True

    @property
    def rise(self) -> float:
        """Above the best, as a share of it (or of what it had gained), at most."""
        scale = _scale(self.best, self.gained, bounded=self.bounded)
        return (self.highest - self.best) / scale if scale else math.inf

    def surer(self, policy: GapPolicy) -> bool:
        """Whether the accuracy went on rising: then confidence is wrong and not the answers."""
        return self.accuracy_now > self.accuracy_then + policy.surer


@dataclass(slots=True)
class _Evaluation:
    step: int
    loss: float
    # Of its logarithm the error.
    training: float
    error: float
    accuracy: float


@dataclass(slots=True)
class Course:
    """What is remembered of the evaluations of one data set.

    Attributes:
        name: of the evaluation; empty where there is one only.
    """

    name: str
    evaluations: deque[_Evaluation] = field(default_factory=lambda: deque(maxlen=64))
    first: float = math.nan
    total: int = 0
    best: _Evaluation | None = None
    spacing: Spacing = field(default_factory=Spacing)
    watch: Watch[Gap] = field(default_factory=Watch)
    no_better: NoBetter = field(default_factory=NoBetter)


@dataclass(slots=True)
class GapState:
    """What `generalization.gap` remembers.

    Attributes:
        training: losses with their steps.
        constants: newest losses of the best constant answer to a batch.
        visits: how often the samples of training have come.
        first_step: with a loss.
        logged: the evaluations that a user logs, as long as the agent sees none itself.
        lowest: loss of training and evaluation so far.
        courses: evaluations by series.
    """

    training: deque[tuple[int, float]]
    constants: deque[float] = field(default_factory=lambda: deque(maxlen=_BATCHES))
    visits: Visits = field(default_factory=Visits)
    lowest: float = math.inf
    first_step: float = math.inf
    logged: LoggedEvaluations = field(default_factory=LoggedEvaluations)
    courses: dict[str, Course] = field(default_factory=dict)

    def agent_sees(self, step: int) -> None:
        """The agent sees an evaluation itself: those that are logged are over."""
        self.logged.over = True
        for name in self.logged.newest:
            if (course := self.courses.get(name)) is not None:
                for watch in (course.watch, course.no_better.watch):
                    if watch.current is not None:
                        watch.current.clear_after = 0
                    watch.good(step)


class GeneralizationGap(Detector[GapState]):
    """The loss of the evaluation rises while that of training falls: the data are memorised.

    Each evaluation (`eval/loss`, `eval/val/loss`) is judged for itself; one whose name says that it
    is of the training data is not. Where the agent sees none, one that is logged (`val_loss`).

    Statistic:
        With 6 evaluations or more (4 where each since the best is worse than the one before; then
        the newest counts), 3 of them after the best: the median of the last 3 lies above
        the best by more than 5 % of it, by more than 4 times the noise of the evaluations (from
        the differences of neighbours) and by more than 5 % of what they had gained, rises since
        the best (Mann-Kendall Z above 2), and the loss of training (median of up to 20, of the
        last 20 steps or since the evaluation before) is below what it was at the best by more
        than twice the standard error of both, of N losses 1 + 10 / N times that. It is over when an
        evaluation comes back to within half of those 5 %.
        Where the loss has been negative, or is none whose lower bound is known (no accuracy and no
        `target_deviance`), these shares are of what the evaluations had gained, or training since.
        Or 3 evaluations in a row lose 90 % of what the best constant answer does
        (`target_deviance`) or more, while training loses a quarter of that or less. Or all of 8
        and more, of every evaluation, are worse than a constant, and the last 3 than the first by
        twice their noise, while training is better by 2 % and 4 standard errors.

    Severity:
        Warning where it is no better than a constant answer. Else warning from a rise of 15 % on,
        info below; info also where the accuracy of the evaluation went on rising (the model is too
        sure, its answers are not worse), and for losses that change their sign.

    Evidence:
        `evaluation` (its name, where there are several), `best`, `best_step`, `now`, `rise` (at
        most), `training_then`, `training_now`, and with an accuracy `accuracy_then`,
        `accuracy_now`. Of one no better than a constant answer `evaluated`, `training`, `constant`.

    Source:
        Early stopping by the rise above the best (Prechelt 1998), with a noise floor. SageMaker's
        rule, a gap of 10 % between both losses, fires on 56 of 64 healthy runs; this one on those
        that do memorise noise.
    """

    kinds = ("generalization.gap",)
    needs = ("eval/*loss",)
    wants = ("loss", _CONSTANT, _SHARE, "eval/*accuracy", "*loss*", "*Loss*", "*acc*")

    policy: GapPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Evaluations whose loss can change."""
        return (Reach(self.needs, self.policy.few, TO_THE_END, moves="at all"),)

    def start(self) -> GapState:
        """Nothing seen yet."""
        return GapState(deque(maxlen=self.policy.training))

    def advance(self, window: Window, state: GapState) -> Outcome:
        """Takes the evaluations one by one."""
        seen = [name for name in sorted(window.series) if _is_judged(name)]
        logged = [name for name in sorted(window.series) if is_logged_evaluation(name)]
        state.visits.lay(window)
        accuracies = {name: name.removesuffix("loss") + "accuracy" for name in seen}
        accuracies |= {name: accuracy_beside(name, window) for name in logged}
        for step, row in together(
            window, "loss", _CONSTANT, _SHARE, *accuracies, *accuracies.values()
        ):
            if math.isfinite(row.get(_CONSTANT, math.nan)):
                share = row.get(_SHARE, 1.0)
                state.constants.append(row[_CONSTANT] / share if share > 0 else row[_CONSTANT])
            if math.isfinite(row.get("loss", math.nan)):
                state.first_step = min(state.first_step, step)
                state.training.append((step, row["loss"]))
                state.lowest = min(state.lowest, row["loss"])
            if not state.logged.over and any(
                math.isfinite(row.get(name, math.nan)) for name in seen
            ):
                state.agent_sees(step)
            for name, of_accuracy in accuracies.items():
                loss = row.get(name, math.nan)
                if math.isfinite(loss) and (name in seen or state.logged.takes(name, step, loss)):
                    course = state.courses.setdefault(name, Course(_name(name)))
                    accuracy = row.get(of_accuracy, math.nan)
                    training, error = self._training(step, state, course)
                    state.lowest = min(state.lowest, loss)
                    # A cross entropy or a squared error; likelihoods of densities have no bound.
                    bounded = state.lowest >= 0 and (
                        bool(state.constants) or math.isfinite(accuracy)
                    )
                    new = _Evaluation(step, loss, training, error, accuracy)
                    self._take(course, new, bounded=bounded)
                    spacing = course.spacing.steps(self.policy.last)
                    constant = median(state.constants)
                    state.visits.pass_to(step)
                    found = Losses(loss, training, constant, error, state.visits.mean)
                    others = (c.no_better.better for c in state.courses.values())
                    # What was trained before has come down already, in whatever unit.
                    if name in seen or state.first_step <= 1:
                        course.no_better.take(
                            step, found, spacing, alone=not any(others), logged=name not in seen
                        )
        state.visits.pass_to(window.last_step)
        findings = []
        for course in state.courses.values():
            worse = list(course.no_better.watch.take(window.last_step))
            rises = [_finding(e, course, self.policy) for e in course.watch.take(window.last_step)]
            # One of them says it all: the one that was there first, if it is a warning as well.
            if worse and not (rises and rises[0].seen_step < worse[0].seen_step):
                findings += [finding_of(episode, course.name) for episode in worse]
            else:
                findings += rises
                if worse and all(finding.severity == "info" for finding in rises):
                    findings += [finding_of(episode, course.name) for episode in worse]
        return Outcome({"generalization.gap": self._check(state)}, tuple(findings))

    def _training(self, step: int, state: GapState, course: Course) -> tuple[float, float]:
        """The loss of training by the time of an evaluation, and its logarithm's error."""
        if not state.training:
            return math.nan, 0.0
        # In a sparse log as many losses would reach back over several evaluations.
        before = course.evaluations[-1].step if course.evaluations else -1
        since = min(step - self.policy.training, before)
        recent = [loss for at, loss in state.training if at > since]
        recent = recent or [state.training[-1][1]]
        error = median_error(np.array(recent), len(recent)) if min(recent) >= 0 else 0.0
        # Of a few values the error is not well known either.
        return median(recent), error * (1 + 10 / len(recent))

    def _fell(self, then: _Evaluation, now: _Evaluation) -> bool:
        """Whether the loss of training is below what it was, beyond doubt.

        Without one nothing says that it is not that which rises.
        """
        if not (then.training > 0 and now.training >= 0):
            return now.training <= then.training
        # A loss of 0 is negligible, as among those that the error is of.
        fell = -math.log(max(now.training / then.training, 1e-12))
        return fell > self.policy.fallen * math.hypot(then.error, now.error)

    def _take(self, state: Course, new: _Evaluation, *, bounded: bool) -> None:
        policy = self.policy
        state.evaluations.append(new)
        state.spacing.push(new.step)
        state.total += 1
        if state.total == 1:
            state.first = new.loss
        if state.best is None or new.loss < state.best.loss:
            state.best = new
        best = state.best
        gained = np.nanmax([state.first - best.loss, best.training - new.training])
        scale = _scale(best.loss, float(gained), bounded=bounded)
        state.watch.clear_after = state.spacing.steps(policy.last)
        known = state.watch.current
        if known is not None and known.holding:
            # Hysteresis: what is open stays so until half of the rise is gone.
            if new.loss - best.loss < 0.5 * policy.slight * scale:
                state.watch.good(new.step)
                return
            last = [e.loss for e in list(state.evaluations)[-policy.last :]]
            _update(state.watch.bad(new.step, known.facts), new, median(last))
            return
        later = [e for e in state.evaluations if e.step >= best.step]
        losses = [e.loss for e in later]
        few = state.total < policy.evaluations
        if few and (state.total < policy.few or losses != sorted(losses)):
            state.watch.good(new.step)
            return
        if len(later) <= policy.after:
            state.watch.good(new.step)
            return
        # Where each is worse than the one before, the newest is no outlier.
        now = new.loss if few else median(losses[-policy.last :])
        rise = now - best.loss
        noise = robust_sigma(np.diff([e.loss for e in state.evaluations])) / math.sqrt(2)
        rises = (
            rise > policy.slight * scale
            and rise > policy.noise * noise
            and rise > policy.progress * (state.first - best.loss)
            and (few or mann_kendall(losses) > policy.trend)
            and self._fell(best, new)
        )
        if not rises:
            state.watch.good(new.step)
            return
        accuracies = [e.accuracy for e in later[-policy.last :]]
        facts = Gap(
            best.loss,
            best.step,
            now,
            now,
            best.training,
            new.training,
            best.accuracy,
            median(accuracies),
            float(gained),
            bounded,
        )
        state.watch.bad(new.step, facts, first_step=best.step)

    def _check(self, state: GapState) -> Check:
        most = max((course.total for course in state.courses.values()), default=0)
        judged = [c for c in state.courses.values() if c.total >= self.policy.few]
        if not judged:
            return too_few(most, "evaluation", self.policy.few)
        if not any(c.best is not None and math.isfinite(c.best.training) for c in judged):
            return Check.missing("No rank posts the loss of training.")
        return Check.ok(sentences(*(_standing(course) for course in judged[:4])))


def _scale(best: float, gained: float, *, bounded: bool) -> float:
    """What a rise is held against: the best loss, or what it had gained where 0 is no bound.

    The negative log-likelihood of a density, or an energy, may be 0 anywhere: its unit is changed
    by a constant, and no share of it means anything.
    """
    if bounded or gained <= 0:
        return abs(best)
    return gained if best < 0 else max(best, gained)


def _is_judged(name: str) -> bool:
    """Whether a series is the loss of an evaluation, and of other data than those of training."""
    return (
        name.startswith("eval/")
        and (name == "eval/loss" or name.endswith("/loss"))
        and "train" not in name.lower()
    )


def _name(series: str) -> str:
    return series.removeprefix("eval/").removesuffix("loss").strip("/_")


def _standing(course: Course) -> str:
    of = f" of `{course.name}`" if course.name else ""
    assert course.best is not None
    return (
        f"The best of {count(course.total, 'evaluation')}{of} is {number(course.best.loss)} "
        f"(step {course.best.step}), the last one {number(course.evaluations[-1].loss)}."
    )


def _update(episode: Episode[Gap], new: _Evaluation, level: float) -> None:
    facts = episode.facts
    facts.now, facts.training_now = new.loss, new.training
    facts.highest = max(facts.highest, level)
    if math.isfinite(new.accuracy):
        facts.accuracy_now = new.accuracy


def _finding(episode: Episode[Gap], state: Course, policy: GapPolicy) -> Finding:
    facts = episode.facts
    slight = not facts.rise > policy.rise
    evidence: dict[str, float | str] = {
        "best": facts.best,
        "best_step": facts.best_step,
        "now": facts.now,
        "rise": facts.rise,
        "training_then": facts.training_then,
        "training_now": facts.training_now,
    }
    if math.isfinite(facts.accuracy_then) and math.isfinite(facts.accuracy_now):
        evidence |= {"accuracy_then": facts.accuracy_then, "accuracy_now": facts.accuracy_now}
    if state.name:
        evidence["evaluation"] = state.name
    which = f"evaluation `{state.name}`" if state.name else "evaluation"
    fell = (
        f"Since step {facts.best_step} the loss of training went from "
        f"{number(facts.training_then)} to {number(facts.training_now)}."
    )
    if facts.surer(policy):
        cause = (
            f"{fell} The accuracy of the evaluation rose meanwhile "
            f"({percent(facts.accuracy_then)} to {percent(facts.accuracy_now)}): the answers are "
            "not worse, but too confident."
        )
        remedy = (
            "If probabilities matter, calibrate them (temperature scaling) or smooth the labels; "
            "otherwise choose the checkpoint by accuracy."
        )
    elif not facts.bounded:
        cause = (
            f"{fell} What training gains is of its own samples alone and is lost on others. As the "
            "loss has no lower bound that is known (a density, an energy), it can go on falling "
            "there: narrow peaks at the samples, or scores without a limit."
        )
        remedy = (
            f"Use the checkpoint of step {facts.best_step} and stop there. To get further: more "
            "data or noise on them, weight decay, a smaller model, a bound of the scale "
            "(a least variance, a penalty on the size of scores)."
        )
    else:
        cause = (
            f"{fell} The model memorises its samples: they are too few for its size, some "
            "labels are wrong, or it is trained for too long."
        )
        remedy = (
            f"Use the checkpoint of step {facts.best_step} and stop there. To get further: more "
            "data or augmentation, weight decay or dropout, a smaller model."
        )
    above = percent(facts.rise) if facts.bounded else number(facts.highest - facts.best)
    surrogate = facts.best < 0 or state.first < 0
    return episode.finding(
        kind="generalization.gap",
        key=state.name,
        severity="info" if facts.surer(policy) or surrogate or slight else "warning",
        title=(
            f"The loss of the {which} is {above} above its best of "
            f"{number(facts.best)} (step {facts.best_step}) while that of training falls"
        ),
        cause=cause,
        remedy=remedy,
        evidence=evidence,
    )
