"""A gradient that outgrows what it was."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Detector, Finding, Outcome, Reach
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.history import Companions, Phases, rate_sentence
from rankscope.server.detectors.mechanisms.series_by_step import median, together
from rankscope.server.detectors.mechanisms.sliding_median import SlidingMedian
from rankscope.server.detectors.mechanisms.statistics import (
    Progress,
    Spacing,
    Unmeasured,
    exceeds,
    robust_sigma,
)
from rankscope.server.detectors.mechanisms.waiting import too_few
from rankscope.server.detectors.mechanisms.wording import count, number, sentences
from rankscope.server.detectors.policy import Count, Observations, RisePolicy, Share, Steps, Times
from rankscope.server.window import Check, Window

# Losses that are remembered, and how many standard errors make a difference of them.
_LOSSES = 128
_CLEAR = 2.0
# Losses at the start whose median is taken, and the share of it that has to be gained to be lost.
_BEGIN, _GAINED = 5, 0.1
# A norm that clipping leaves alone is the same before and after it, but for rounding in float16.
_CUT = 0.99


@dataclass(frozen=True, slots=True)
class ExplodingPolicy(RisePolicy):
    """Thresholds of `gradient.exploding`.

    Attributes:
        evidence: finite norms that are needed before anything is judged.
        warm: norms at the beginning that are not examined.
        in_a_row: consecutive observations that have to exceed the limits.
        factor: median of the newest norms over the usual one, from which on it is reported.
        of_start: median of the newest norms over the first ones that has to be exceeded too.
        onset: norm over the usual one at which it is taken to have begun.
        newest: number of most recent norms whose median is judged.
        usual: number of norms before these whose median is the usual one.
        first: number of norms at the start whose median is taken.
        held: norm over the usual one, down to which it goes on.
        critical: largest norm over the usual one, from which on it is critical.
        calm: steps below `held` after which it is over.
        patience: consecutive observations that are needed where the loss has not risen.
        level: number of most recent losses compared with those before the onset.
        lost: share of what the loss has gained, up to which it hardly changes where the norm is
            none that the training did not begin with: samples that are learned last. A tenth was
            lost and regained by a healthy one; half of it more is left to others.
        as_begun: norm over the first ones, up to which that is so: single norms scatter by as much.
    """

    evidence: Observations = 40
    warm: Observations = 20
    in_a_row: Count = 3
    factor: Times = 10.0
    of_start: Times = 0.5
    onset: Times = 5.0
    newest: Observations = 6
    usual: Observations = 100
    first: Observations = 50
    held: Times = 3.0
    critical: Times = 100.0
    calm: Steps = 50
    patience: Count = 24
    level: Observations = 8
    lost: Share = 0.15
    as_begun: Times = 3.0


@dataclass(slots=True)
class Explosion:
    """What was seen: the norm it had, the largest one, and the rate's rise before, if any.

    Attributes:
        clip: the norm to which clipping has cut the gradient meanwhile; NaN where none did.
        phase: what says that the data became others where it began; empty for nothing.
        first: norm at the start.
        lost: largest share of what the loss had gained that it has lost since; 1 where it had
            gained nothing, or none is known.
    """

    usual: float
    worst: float
    lr_before: float = math.nan
    lr_after: float = math.nan
    lr_step: int = -1
    clip: float = math.nan
    phase: str = ""
    first: float = math.nan
    lost: float = 0.0

    def small(self, policy: ExplodingPolicy) -> bool:
        """Whether the training began with such norms, and the loss hardly feels them."""
        return self.lost < policy.lost and self.worst <= policy.as_begun * self.first


@dataclass(slots=True)
class ExplodingState:
    """What `gradient.exploding` remembers; the norms in the order of their steps."""

    recent: deque[tuple[int, float]]
    newest: SlidingMedian
    usual: SlidingMedian
    watch: Watch[Explosion]
    total: int = 0
    unmeasured: Unmeasured = field(default_factory=Unmeasured)
    first: list[float] = field(default_factory=list)
    above: int = 0
    # The last step at which clipping cut the gradient, and to which norm.
    cut: tuple[int, float] = (-1, math.nan)
    spacing: Spacing = field(default_factory=Spacing)
    companions: Companions = field(default_factory=Companions)
    phases: Phases = field(default_factory=Phases)
    losses: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_LOSSES))
    progress: Progress = field(default_factory=Progress)
    begin: list[float] = field(default_factory=list)

    def lost(self, level: int) -> float:
        """Share of what the loss has gained that it has lost again, by the last `level` losses."""
        start, best = median(self.begin), self.progress.best
        newest = [value for _, value in self.losses][-level:]
        gained = start - best
        if not all(map(math.isfinite, newest)):
            return 1.0
        if len(newest) < level or not gained > _GAINED * abs(start):
            return 1.0
        return (median(newest) - best) / gained

    def push(self, step: int, norm: float) -> None:
        """Takes a norm; what is no longer among the newest becomes usual."""
        self.recent.append((step, norm))
        passed = self.newest.push(norm)
        if passed is not None:
            self.usual.push(passed)

    def forget(self) -> None:
        """Begins anew with what is usual."""
        self.recent.clear()
        self.newest.clear()
        self.usual.clear()
        self.above = 0


class GradientExploding(Detector[ExplodingState]):
    """The norm of the gradient grows to more than ten times what it was, and not at one step only.

    Statistic:
        The median of the last 6 norms lies above 10 times the median of the 100 before them, and
        above half of what the norm was in the first 50 steps, at 3 steps in a row; after 20 steps,
        with at least 40 norms above 0. Where a loss is posted it counts what became of it: never
        while its last 8 lie below those of before by 2 standard errors (a network that leaves a
        plateau has larger gradients, and learns), and after 24 steps where they do not lie above
        them either.
        The norm before clipping counts where it is posted. While it lasts
        the norms do not become what is usual; it is over after 50 steps below 3 times the usual.

    Severity:
        Warning; critical from 100 times the usual norm on. Info where the data became others as it
        began (as in `loss.spike`, which reports whether they are learned), and where the norm is
        within 3 times the first ones and the loss has lost less than 15 % of what it had gained.

    Evidence:
        `usual`, `worst`, `factor`, and where the learning rate rose before `lr_before`,
        `lr_after`, `lr_step`; `clip`, the norm to which clipping cuts it meanwhile, if it does.

    Source:
        Pascanu, Mikolov and Bengio (2013), as a ratio of medians, so that single outliers and the
        small norms of a finished training do not count. Never on a healthy run of the corpus.
    """

    kinds = ("gradient.exploding",)
    of_one_task = True
    needs = ("grad_norm",)
    wants = ("grad_norm_preclip", "lr", "loss", *Phases.SERIES)

    policy: ExplodingPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Norms that outweigh the newest ones, and go on doing so; clipping ends it soon."""
        most = self.policy.newest // 2 + self.policy.in_a_row
        return (Reach(("grad_norm", "grad_norm_preclip"), most, moves="from zero"),)

    def start(self) -> ExplodingState:
        """Nothing seen yet."""
        policy = self.policy
        return ExplodingState(
            deque(maxlen=policy.usual + policy.newest),
            SlidingMedian(policy.newest),
            SlidingMedian(policy.usual),
            Watch(clear_after=policy.calm),
        )

    def advance(self, window: Window, state: ExplodingState) -> Outcome:
        """Takes the norms one by one; one that is not finite is another detector's matter."""
        state.companions.take(window)
        state.phases.take(window)
        for step, row in together(window, "grad_norm", "grad_norm_preclip", "loss"):
            if "loss" in row:
                state.losses.append((step, row["loss"]))
                state.progress.push(step, row["loss"])
                if len(state.begin) < _BEGIN:
                    state.begin.append(row["loss"])
            if "grad_norm" not in row and "grad_norm_preclip" not in row:
                continue
            state.companions.pass_to(step)
            norm = row.get("grad_norm_preclip", row.get("grad_norm", math.nan))
            state.unmeasured.push(step, finite=math.isfinite(norm))
            applied = row.get("grad_norm", math.nan)
            if applied < _CUT * norm:
                state.cut = step, applied
            # A gradient that is exactly zero has no size that another could be many times.
            if math.isfinite(norm) and norm > 0:
                self._take(step, norm, state)
        findings = tuple(_finding(e, self.policy) for e in state.watch.take(window.last_step))
        return Outcome({"gradient.exploding": _check(state, self.policy)}, findings)

    def _take(self, step: int, norm: float, state: ExplodingState) -> None:
        policy = self.policy
        state.spacing.push(step)
        state.total += 1
        if len(state.first) < policy.first:
            state.first.append(norm)
        known = state.watch.current
        if known is not None and known.holding:
            if exceeds(norm, policy.held * known.facts.usual):
                state.watch.bad(step, known.facts)
                known.facts.worst = max(known.facts.worst, norm)
                known.facts.lost = max(known.facts.lost, state.lost(policy.level))
                if state.cut[0] == step:
                    known.facts.clip = state.cut[1]
                return
            # What it was before belongs to the past: the new level is judged by itself.
            state.forget()
            state.watch.good(step)
            return
        state.push(step, norm)
        if len(state.recent) < policy.evidence or state.total <= policy.warm + policy.newest:
            state.watch.good(step)
            return
        usual, newest = state.usual.median, state.newest.median
        grew = exceeds(newest, policy.factor * usual)
        grew = grew and exceeds(newest, policy.of_start * median(state.first))
        state.above = state.above + 1 if grew else 0
        if state.above < policy.in_a_row:
            state.watch.good(step)
            return
        onset = _onset(state, usual, policy)
        course = _course(state, onset, policy)
        if course < 0 or (course == 0 and state.above < policy.patience):
            # A network that leaves a plateau has larger gradients, and learns.
            state.watch.good(step)
            return
        facts = Explosion(usual, state.newest.largest, first=median(state.first))
        facts.lost = state.lost(policy.level)
        if state.cut[0] >= onset:
            facts.clip = state.cut[1]
        rise = state.companions.raised_rate(
            onset, before=state.spacing.steps(policy.rise_before), factor=policy.rise
        )
        if rise is not None:
            facts.lr_before, facts.lr_after = rise["lr_before"], rise["lr_after"]
            facts.lr_step = int(rise["lr_step"])
        else:
            facts.phase = state.phases.began(onset, step)
        state.watch.bad(step, facts, first_step=onset)


def _onset(state: ExplodingState, usual: float, policy: ExplodingPolicy) -> int:
    """The first large norm after the last usual one: large ones of the start are not meant."""
    norms = list(state.recent)
    past = (
        place for place, (_, norm) in enumerate(norms[: -policy.newest]) if not exceeds(norm, usual)
    )
    later = norms[max(past, default=-1) + 1 :]
    return next((step for step, norm in later if exceeds(norm, policy.onset * usual)), norms[-1][0])


def _course(state: ExplodingState, onset: int, policy: ExplodingPolicy) -> int:
    """Where the loss went with the norm: 1 up (or not known), -1 down, 0 nowhere as yet."""
    before = np.array([v for s, v in state.losses if s < onset and math.isfinite(v)])
    since = [v for s, v in state.losses if s >= onset]
    if len(before) < policy.level or not since or not all(map(math.isfinite, since)):
        return 1
    newest, before = np.array(since[-policy.level :]), before[-4 * policy.level :]
    # Of the differences of neighbours: a trend hardly enters them. Medians err by 1.25 times that.
    noise = 1.25 * robust_sigma(np.diff(before)) / math.sqrt(2)
    error = noise * math.sqrt(1 / len(newest) + 1 / len(before))
    risen = float(np.median(newest)) - float(np.median(before))
    if exceeds(abs(risen), _CLEAR * error):
        return 1 if risen > 0 else -1
    return 0


def _check(state: ExplodingState, policy: ExplodingPolicy) -> Check:
    if state.unmeasured.lasting:
        since = state.unmeasured.since
        why = f"No gradient is finite since step {since}: from then on its size shows nothing."
        return Check.insufficient(why)
    if state.total < policy.evidence:
        return too_few(state.total, "finite gradient norm", policy.evidence)
    return Check.ok(f"{count(state.total, 'gradient norm')} examined, none grew tenfold.")


def _finding(episode: Episode[Explosion], policy: ExplodingPolicy) -> Finding:
    facts = episode.facts
    factor = facts.worst / facts.usual if facts.usual else math.inf
    evidence: dict[str, float] = {"usual": facts.usual, "worst": facts.worst, "factor": factor}
    clipped = ""
    clip = f"Clip the norm at {number(2 * facts.usual)}, twice the usual one."
    if math.isfinite(facts.clip):
        evidence["clip"] = facts.clip
        clipped = (
            f"Clipping cuts the applied gradient to a norm of {number(facts.clip)}: only its "
            "direction is left."
        )
        clip = "The norm is clipped already, which keeps single steps from being too long."
    if facts.lr_step >= 0:
        rise = {
            "lr_before": facts.lr_before,
            "lr_after": facts.lr_after,
            "lr_step": facts.lr_step,
        }
        evidence |= rise
        cause = sentences(
            rate_sentence(rise),
            clipped or "Steps of that size leave the valley.",
        )
        remedy = (
            f"Keep the learning rate near {number(facts.lr_before)} and restart from a checkpoint "
            f"before step {episode.first_step}. {clip}"
        )
    elif facts.phase:
        cause = (
            f"{facts.phase} The data have been different since then, and learning them makes "
            "gradients of another size."
        )
        remedy = (
            "Nothing, if the change is meant and the loss falls. Else look at the data from step "
            f"{episode.first_step} on. {clip}"
        )
    else:
        cause = sentences(
            "No rise of the learning rate was seen before it. Possibly it is too high for this "
            "stage of the training, a deep or recurrent path multiplies the gradient, or the "
            "data changed (another source, inputs that are not normalised).",
            clipped,
        )
        remedy = (
            f"{clip} If the loss rose with it, restart "
            f"before step {episode.first_step} with a third of the learning rate; look at the "
            f"batches from step {episode.first_step} on."
        )
    return episode.finding(
        kind="gradient.exploding",
        severity=(
            "info"
            if facts.phase or facts.small(policy)
            else "critical"
            if factor >= policy.critical
            else "warning"
        ),
        title=(
            f"The gradient has grown from {number(facts.usual)} to {number(facts.worst)} since "
            f"step {episode.first_step}"
        ),
        cause=cause,
        remedy=remedy,
        evidence=evidence,
    )
