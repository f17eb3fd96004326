"""A loss that falls from one step to the next by more than any training does."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Detector, Finding, Outcome, Reach
from rankscope.server.detectors.effects import BLUR, EPISODE, Rule
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.history import Phases
from rankscope.server.detectors.mechanisms.incident import AGREED_UNTIL
from rankscope.server.detectors.mechanisms.leaps import BEYOND, Leaps
from rankscope.server.detectors.mechanisms.statistics import Spacing, rank_rows
from rankscope.server.detectors.mechanisms.wording import count, if_several, number, sentences
from rankscope.server.detectors.policy import Observations, Policy, Share, Times
from rankscope.server.window import Check, Float64, Window

# Steps from one loss to the next up to which a step is seen by itself.
_NEXT = 1.5


@dataclass(frozen=True, slots=True)
class DroppedPolicy(Policy):
    """Thresholds of `loss.dropped`.

    Attributes:
        before: observations before the step. With `after` there are 7.7e7 orders of values that are
            drawn alike, of which one has all of the later ones below all of the earlier.
        after: observations from the step on.
        factor: by which the loss falls, at the least, between the medians of `after` observations.
        own: the same of each rank's: what one rank's loss does alone is another matter.
        jump: size of the step itself, over the largest move of those before: what falls faster and
            faster, off a plateau, does not fall by that from one step to the next.
        share: of the whole fall, on the logarithm, that the step itself has.
        level: loss before over that of the first `after` observations, at the least: what has been
            memorised falls by any factor.
        above: the same over the very first loss, at the most: what had exploded falls back.
    """

    before: Observations = 32
    after: Observations = 8
    factor: Times = 2.0
    own: Times = 1.4
    jump: Times = 2.0
    share: Share = 0.6
    level: Share = 0.05
    above: Times = 2.0


@dataclass(frozen=True, slots=True)
class Drop:
    """What is known of one.

    Attributes:
        before, now: medians of the losses.
        agreed_until: step of the last observation before.
        phase: what says that a new phase has begun; empty for nothing.
        world: number of ranks.
    """

    before: float
    now: float
    agreed_until: int
    phase: str
    world: int


@dataclass(slots=True)
class DroppedState:
    """What is remembered: steps and every rank's loss, [R] each; `begin`: the first mean losses.

    Attributes:
        reaches: by how much the step before each can have changed it; NaN where not known.
        ranks: that have posted a loss.
    """

    steps: deque[int] = field(default_factory=deque)
    reaches: deque[float] = field(default_factory=deque)
    losses: deque[Float64] = field(default_factory=deque)
    begin: list[float] = field(default_factory=list)
    ranks: tuple[int, ...] = ()
    signed: bool = False
    spacing: Spacing = field(default_factory=Spacing)
    phases: Phases = field(default_factory=Phases)
    leaps: Leaps = field(default_factory=Leaps)
    watch: Watch[Drop] = field(default_factory=Watch)


class LossDropped(Detector[DroppedState]):
    """The loss of every rank falls from one step to the next, by more than a step can teach.

    A loss falls as fast as the parameters move. One that is halved at once, and stays there, is of
    another question than before, and of an easier one: the same noise, masks or targets at every
    step, samples of one kind, targets among the inputs, augmentation or dropout that is off, terms
    of the loss that are gone, another divisor. What is trained from then on is not what was meant.

    Statistic:
        The mean losses of 8 consecutive steps lie below all of the 32 before them; medians of 8
        fall to a half or less, and of each rank's own to 1 / 1.4. The first step of these has 0.6
        of the fall on the logarithm, and twice the largest move between the neighbours of the 32.
        Not below a twentieth of the loss of the first steps, nor from above twice the very first
        one, nor where the step before can have made a third of the fall (its length times the
        largest norm of the gradient before and after it: the mean value theorem), nor of losses
        that are not positive or not known at every step. Over when 8 observations are nearer to the
        level before.

    Severity:
        Warning; info where the data became others at that step, or a mark was set.

    Evidence:
        `before`, `now` (medians), `factor`, `agreed_until`.

    Source:
        Orders of values that are drawn alike are equally likely (rank test of Wilcoxon, 1945, at
        its extreme).
    """

    kinds = ("loss.dropped",)
    of_one_task = True
    needs = ("loss",)
    wants = (*Phases.SERIES, *Leaps.SERIES)
    effects = (
        Rule(
            root=("loss.rescaled", "mode.", "data.", "update.", "rank.failed", "gradient."),
            consequence=("loss.dropped",),
            earliest=-BLUR,
            latest=EPISODE,
            why="what is asked of the model, or what answers, is another from that step on",
        ),
        Rule(
            root=("loss.dropped",),
            consequence=("metric.anomaly", "gradient.", "layer.", "loss.plateau"),
            earliest=-BLUR,
            why="from that step on the model is trained on something easier",
        ),
    )
    policy: DroppedPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """What has become easier mostly stays so."""
        return (Reach(("loss",), self.policy.after, lasts=1.0),)

    def start(self) -> DroppedState:
        """Nothing seen yet."""
        state = DroppedState()
        state.watch.clear_after = self.policy.after
        return state

    def advance(self, window: Window, state: DroppedState) -> Outcome:
        """Takes the losses step by step."""
        policy = self.policy
        state.phases.take(window)
        state.leaps.take(window)
        known = np.isin(window.ranks, state.ranks)
        for step, row in zip(*(a.tolist() for a in rank_rows(window, "loss")), strict=True):
            losses = np.array(row)
            state.spacing.push(step)
            state.leaps.pass_to(step)
            # A server of parameters has none, ever, and a stage but the last one.
            there = ~np.isnan(losses)
            if there.sum() > len(state.ranks) or not there[known].all():
                state.ranks = tuple(sorted({*state.ranks, *window.ranks[there].tolist()}))
                known = np.isin(window.ranks, state.ranks)
            losses = losses[known]
            if (
                not len(losses)
                or not np.isfinite(losses).all()
                or (state.losses and len(state.losses[-1]) != len(losses))
            ):
                _forget(state)
                continue
            state.signed |= bool((losses <= 0).any())
            if len(state.begin) < policy.after:
                state.begin.append(float(losses.mean()))
            episode = state.watch.open(step)
            if episode is not None:
                self._follow(state, episode.facts, step, float(losses.mean()))
                continue
            state.steps.append(step)
            state.reaches.append(state.leaps.reach(step))
            state.losses.append(losses)
            if len(state.steps) < policy.before + policy.after or state.signed:
                continue
            at = state.steps[policy.before]
            found = self._found(state)
            if found is None:
                state.watch.good(at)
                state.steps.popleft()
                state.reaches.popleft()
                state.losses.popleft()
            else:
                state.watch.bad(step, found, first_step=at)
                _forget(state)
        state.leaps.pass_to(window.last_step)
        findings = [_finding(e) for e in state.watch.take(window.last_step)]
        return Outcome({"loss.dropped": self._check(state)}, tuple(findings))

    def _found(self, state: DroppedState) -> Drop | None:
        policy, n = self.policy, self.policy.before
        last, first = float(state.losses[n - 1].mean()), float(state.losses[n].mean())
        # Nearly every step stops here.
        if first * policy.factor**policy.share > last or state.spacing.interval > _NEXT:
            return None
        rows = np.stack(state.losses)
        means = np.log(rows.mean(axis=1))
        early, late = means[:n], means[n:]
        whole = float(np.median(early[-policy.after :]) - np.median(late))
        step = float(early[-1] - late[0])
        if late.max() >= early.min() or whole < math.log(policy.factor):
            return None
        if step < policy.share * whole or step < policy.jump * np.abs(np.diff(early)).max():
            return None
        before, now = (np.median(part, axis=0) for part in (rows[n - policy.after : n], rows[n:]))
        if (before < policy.own * now).any():
            return None
        usual = float(np.exp(np.median(early[-policy.after :])))
        if usual < policy.level * float(np.mean(state.begin)):
            return None
        if usual > policy.above * state.begin[0]:
            return None
        if last - first < BEYOND * state.reaches[n]:
            return None
        steps = list(state.steps)
        return Drop(
            before=usual,
            now=float(np.exp(np.median(late))),
            agreed_until=steps[n - 1],
            phase=state.phases.began(steps[n], steps[-1]),
            world=rows.shape[1],
        )

    def _follow(self, state: DroppedState, facts: Drop, step: int, loss: float) -> None:
        # Nearer to what it was, on the logarithm, than to what it had become.
        if loss > 0 and loss**2 >= facts.before * facts.now:
            state.watch.good(step)
        else:
            state.watch.bad(step, facts)

    def _check(self, state: DroppedState) -> Check:
        if state.signed:
            why = "Of losses that are not positive it cannot be said by which factor they fall."
            return Check.not_applicable(why)
        if not state.watch.judged:
            need = self.policy.before + self.policy.after
            why = f"{count(len(state.steps), 'loss value')} of {need} in a row needed."
            return Check.insufficient(why)
        why = f"{count(state.watch.judged, 'step')} judged: the loss was never halved at one step."
        return Check.ok(why)


def _forget(state: DroppedState) -> None:
    state.steps.clear()
    state.reaches.clear()
    state.losses.clear()


def _finding(episode: Episode[Drop]) -> Finding:
    facts, first = episode.facts, episode.first_step
    factor = facts.now / facts.before
    return episode.finding(
        kind="loss.dropped",
        severity="info" if facts.phase else "warning",
        title=f"The loss fell from {number(facts.before)} to {number(facts.now)} at step {first}",
        cause=sentences(
            f"From one step to the next the loss{if_several(facts.world, 'of every rank')} became "
            f"{number(factor)} times what it was, and stayed there: one update of the parameters "
            "does not do that. What the model is asked has become easier: the same noise, masks or "
            "targets at every step, samples of one kind, targets that are among the inputs, "
            "augmentation or dropout that is off, or a term of the loss that is gone.",
            facts.phase,
        ),
        remedy=(
            f"Look at what the model and the loss are given from step {first} on, beside a batch "
            "from before: inputs, targets, weights of terms, random numbers. An evaluation on data "
            "that were held out shows whether the model has become any better."
        ),
        evidence={
            "before": facts.before,
            "now": facts.now,
            "factor": factor,
            AGREED_UNTIL: facts.agreed_until,
        },
    )
