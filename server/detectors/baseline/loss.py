"""A loss that is worse than that of earlier runs of the project had been at the same steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.comparison.courses import Course
from rankscope.server.comparison.levels import at_the_end
from rankscope.server.comparison.measures import Measured, NotMeasured, Recorded, Sides
from rankscope.server.detectors.base import TO_THE_END, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.baseline.curves import Curve, Look, Looks, courses, none_of
from rankscope.server.detectors.baseline.texts import beside, compared_with, differences
from rankscope.server.detectors.effects import EPISODE, Rule
from rankscope.server.detectors.episode import Episode, Watch
from rankscope.server.detectors.policy import Count, Policy, Share
from rankscope.server.detectors.statistics import mean_over_ranks
from rankscope.server.detectors.wording import count, number, percent, sentences
from rankscope.server.window import Baselines, Check, Window

LOSS = "loss"
# What a training is given, at each step: where it is another thing, that was chosen -> in words.
_GIVEN = {"lr": "the learning rate", "samples": "the number of samples in a rank's batch"}
# And of what it is to learn.
_DATA = {"target_deviance": "the loss of the best constant answer to a batch's targets"}
# By so much it is another one: a batch that is now and then not full stays below.
_ANOTHER = 0.05


@dataclass(frozen=True, slots=True)
class LossPolicy(Policy):
    """Thresholds of `baseline.loss`.

    Attributes:
        least: baselines without which nothing is compared: of two, nothing says which of them is
            usual.
        tolerance: share of the loss by which a run may be worse than expected at the last step
            that the baselines have, that of `rankscope gate --against`.
        early_tolerance: the same before: of half a training one does not know yet what will
            remain of a few per cent.
        confidence: of the band at the last step, that of the gate: one run in a hundred is beyond
            it.
        early_confidence: of the band before. A run is compared some 40 times, and twice in a row
            is needed: looks that follow each other agree mostly, so that it comes to some
            independent ones, and one run in a hundred again.
    """

    least: Count = 3
    tolerance: Share = 0.02
    early_tolerance: Share = 0.05
    confidence: Share = 0.99
    early_confidence: Share = 0.999


@dataclass(frozen=True, slots=True)
class Worse:
    """What is known of a look at which a run is worse.

    Attributes:
        measured: the run beside the band.
        given, data: what it is given, and has to learn, that its baselines were not; sentences.
    """

    look: Look
    measured: Measured
    given: Mapping[str, str]
    data: Mapping[str, str]


@dataclass(slots=True)
class LossState:
    """What is remembered.

    Attributes:
        since: first step of the means, and step, of the first of the looks that found it one after
            the other.
        judged: looks at which both sides had enough.
        last: step of the newest of them.
        share: by which the loss was above what is expected there.
    """

    curve: Curve = field(default_factory=Curve)
    beside: dict[str, Curve] = field(default_factory=dict)
    looks: Looks = field(default_factory=Looks)
    since: tuple[int, int] | None = None
    judged: int = 0
    last: int = -1
    share: float = 0.0
    watch: Watch[Worse] = field(default_factory=lambda: Watch(clear_after=0))


class BaselineLoss(Detector[LossState]):
    """The loss is worse than that of earlier runs of the project was at the same steps.

    The server keeps the runs that passed as baselines of their project, and those that somebody
    marks (`rankscope baseline`). A run is held against those of the same model (number of
    parameters) that began before it and whose settings are nearest to its own, while it goes on.
    What seeds do to a loss is in the band of the baselines; what remains is the data, the code, or
    a setting, and the settings that differ are named.

    Statistic:
        That of `rankscope gate --against`, at looks that follow each other by a tenth of the steps
        so far: the mean loss of the last tenth of the steps (a fifth or two fifths where that is
        too short or too noisy), against the prediction limit of Student's t for one more run beside
        the baselines, on the logarithm. A part of the spread between seeds is assumed, which loses
        its weight as baselines are added. Reported where the loss is beyond the limit of 99.9 % and
        5 % worse at all looks that follow each other, the last of which has no step in common with
        the first; or, at the last step that the baselines have, beyond the limit of 99 % and 2 %
        worse, also without the highest value. Over where a look finds it within the last two limits.

    Severity:
        Warning. Information where the run has another learning rate, batch, number of ranks or
        other setting than its baselines, and these are not all alike in it (three at least): who
        tries out settings knows that some are worse.

    Evidence:
        `metric`; `step`: of the last look; `from_step`: of the mean; `value`, `expected`, `limit`;
        `share`: by how much it is above what was expected; `baselines`: each one's value;
        `differing`: settings that differ, own and of the nearest baseline.

    Source:
        Prediction limits of a normal sample; the spread is a scaled inverse chi squared prior with
        the sample (Smyth 2004), errors of means with dependence by Geyer (1992). Of 40 seeds of
        each of 8 small trainings against 10 others see `tests/lab/seeds`.
    """

    kinds = ("baseline.loss",)
    of_one_task = True
    needs = (LOSS,)
    wants = (LOSS, *_GIVEN, *_DATA)
    effects = (
        Rule(
            root=(
                *("desync.", "reduction.", "update.", "schedule.", "data.", "weights.", "loss."),
                *("buffers.", "accuracy.", "gradient.", "layer.", "clipping.", "amp.", "lr."),
                *("compression.", "batch.", "mode.", "push.", "rng.", "checkpoint.", "rank."),
            ),
            consequence=("baseline.loss",),
            earliest=-EPISODE,
            same_ranks=False,
            why="a training in which that is wrong learns worse than those in which it was not",
        ),
    )

    policy: LossPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """What is worse at the end stays so."""
        return (Reach((LOSS,), 8, TO_THE_END),)

    def advance(self, window: Window, state: LossState) -> Outcome:
        """Takes the steps, and compares where a look is due."""
        kind = self.kinds[0]
        baselines = window.baselines
        check = none_of(baselines, self.policy.least)
        if baselines is None or check is not None:
            return Outcome({kind: check or Check.missing("The project has no baselines.")})
        curves = baselines.curves
        state.curve.push(*mean_over_ranks(window, LOSS), curves.get(LOSS, ()))
        for name in (*_GIVEN, *_DATA):
            if name in curves:
                known = state.beside.setdefault(name, Curve())
                known.push(*mean_over_ranks(window, name), curves[name])
        for look in state.looks.until(window.last_step, baselines.last):
            self._compare(look, baselines, state)
        findings = [_finding(e, baselines) for e in state.watch.take(window.last_step)]
        return Outcome({kind: self._check(baselines, state)}, tuple(findings))

    def _compare(self, look: Look, baselines: Baselines, state: LossState) -> None:
        policy = self.policy
        last = self._measured(look, baselines, state, policy.tolerance, policy.confidence)
        if last is None:
            return
        state.judged += 1
        state.last, state.share = look.step, last.value / last.expected - 1
        if last.state != "failed":
            state.since = None
            state.watch.good(look.step)
            return
        if look.final:
            rest = self._measured(
                look, baselines, state, policy.tolerance, policy.confidence, spared=True
            )
            if rest is not None and rest.state == "failed":
                self._bad(last, look, baselines, state)
            elif state.watch.current is None:
                state.watch.good(look.step)
            return
        early = self._measured(
            look, baselines, state, policy.early_tolerance, policy.early_confidence
        )
        if early is None or early.state != "failed" or early.steps is None:
            # What is open stays so: it is still beyond the limits of the end.
            state.since = None if state.watch.open(look.step) is None else state.since
            return
        if state.since is None:
            state.since = early.steps[0], look.step
        if early.steps[0] > state.since[1] or state.watch.open(look.step) is not None:
            self._bad(last, look, baselines, state)

    def _bad(self, found: Measured, look: Look, baselines: Baselines, state: LossState) -> None:
        given = dict(_others(_GIVEN, look, baselines, state))
        data = dict(_others(_DATA, look, baselines, state))
        facts = Worse(look, found, given, data)
        first = state.since[0] if state.since else (found.steps or (look.step, 0))[0]
        state.watch.bad(look.step, facts, first_step=first).facts = facts

    def _measured(
        self,
        look: Look,
        baselines: Baselines,
        state: LossState,
        tolerance: float,
        confidence: float,
        *,
        spared: bool = False,
    ) -> Measured | None:
        """The run beside its baselines at a look; None where there is too little of either.

        Args:
            spared: without the highest value of those that the mean is of.
        """
        own = state.curve.course(look)
        theirs = courses(baselines, LOSS, look)
        begun = [c for c in theirs if len(c.steps)]
        if not len(own.steps) or not begun:
            return None
        first = max(int(own.steps[0]), *(int(c.steps[0]) for c in begun))
        own, *theirs = (_from(c, first) for c in (own, *theirs))
        runs = [
            Recorded(name, {LOSS: c})
            for name, c in zip(baselines.runs, theirs, strict=True)
            if len(c.steps)
        ]
        try:
            sides = Sides(
                Recorded(baselines.of, {LOSS: own}),
                tuple(runs),
                first,
                look.step,
                tolerance,
                confidence,
            )
            found = at_the_end(sides, LOSS)
            if spared and found.steps is not None:
                late = np.flatnonzero(own.steps >= found.steps[0])
                worst = late[np.argmax(own.values[late])]
                kept = Course(np.delete(own.steps, worst), np.delete(own.values, worst))
                rest = Recorded(baselines.of, {LOSS: kept})
                sides = Sides(rest, sides.baseline, first, look.step, tolerance, confidence)
                found = at_the_end(sides, LOSS)
        except NotMeasured:
            return None
        return found if math.isfinite(found.value) else None

    def _check(self, baselines: Baselines, state: LossState) -> Check:
        if not state.judged:
            steps = f"up to step {state.looks.buckets * state.looks.width - 1:,}"
            return Check.insufficient(f"Too few losses are recorded {steps} to be compared.")
        beyond = " They go no further." if state.looks.over else ""
        share = percent(abs(state.share))
        how = "above" if state.share > 0 else "below"
        return Check.ok(
            f"Compared {count(state.judged, 'time')} with {compared_with(baselines.runs)}: up to "
            f"step {state.last:,} the loss is within their band, {share} {how} what is expected."
            f"{beyond}"
        )


def _from(course: Course, first: int) -> Course:
    kept = course.steps >= first
    return Course(course.steps[kept], course.values[kept])


def _others(
    names: Mapping[str, str], look: Look, baselines: Baselines, state: LossState
) -> Iterator[tuple[str, str]]:
    """Of what runs are given that which all baselines had otherwise, in a sentence each."""
    for name, words in names.items():
        width = max(baselines.curves.get(name, {}), default=0)
        if not width or name not in state.beside:
            continue
        at = Look((look.step + 1) // width * width - 1, width, look.final)
        own = _late(state.beside[name].course(at))
        theirs = [v for c in courses(baselines, name, at) if math.isfinite(v := _late(c))]
        if not theirs or not math.isfinite(own):
            continue
        low, high = min(theirs), max(theirs)
        margin = _ANOTHER * max(abs(low), abs(high))
        if own < low - margin or own > high + margin:
            yield name, f"{words} is {number(own)}, {beside(theirs)} in the baselines"


def _late(course: Course) -> float:
    """The median over the last tenth of the buckets; NaN where there is none."""
    late = course.values[-max(1, len(course.values) // 10) :]
    return float(np.median(late)) if len(late) else math.nan


def _finding(episode: Episode[Worse], baselines: Baselines) -> Finding:
    facts = episode.facts
    found, look = facts.measured, facts.look
    share = found.value / found.expected - 1
    by = f"{percent(share)} above" if share < 1 else f"{number(1 + share)} times"
    runs = compared_with(found.runs)
    meant = bool(baselines.unlike or facts.given)
    settings = differences(baselines)
    first, last = found.steps or (look.step, look.step)
    others = [*facts.given.values(), *facts.data.values()]
    return Finding(
        kind="baseline.loss",
        key=LOSS,
        severity="info" if meant and not baselines.established else "warning",
        title=(
            f"From about step {episode.first_step} on the loss is worse than that of earlier runs: "
            f"{by} expected"
        ),
        seen_step=episode.seen_step,
        last_step=episode.last_step,
        first_step=episode.first_step,
        cause=sentences(
            f"The mean loss of steps {first}-{last} is {number(found.value)}; that of {runs} at "
            f"the same steps is {number(found.expected)} ({beside(found.values)}), and one more "
            f"run of the same training stays below {number(found.bound)}.",
            f"At these steps {'; '.join(others)}." if others else "",
            settings,
        ),
        remedy=_remedy(baselines, meant=meant),
        clear_after=episode.clear_after,
        evidence={
            "metric": LOSS,
            "step": look.step,
            "from_step": first,
            "value": found.value,
            "expected": found.expected,
            "limit": found.bound,
            "share": share,
            "baselines": dict(zip(found.runs, found.values, strict=True)),
            "differing": {s.key: [s.own, s.theirs] for s in baselines.differing},
        },
    )


def _remedy(baselines: Baselines, *, meant: bool) -> str:
    compare = f"`rankscope compare {baselines.of} {baselines.runs[0]}`"
    if meant:
        first = "Look whether the settings that differ are meant."
    else:
        first = "Look at what has changed in the data and the code since these runs."
    return (
        f"{first} {compare} shows both runs side by side. If these runs are no measure any more, "
        "take them away: `rankscope baseline RUN --remove`."
    )
