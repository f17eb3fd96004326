"""A loss that is a fraction of what it was from one step on, and so is its gradient."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Detector, Finding, Outcome, Reach
from rankscope.server.detectors.effects import BLUR, EPISODE, Rule
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.history import Phases
from rankscope.server.detectors.mechanisms.incident import AGREED_UNTIL
from rankscope.server.detectors.mechanisms.series_by_step import mean_by_step, rows_by_step
from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.detectors.mechanisms.wording import count, if_several, number, sentences
from rankscope.server.detectors.policy import Observations, Policy, Share, Sigmas, Times
from rankscope.server.window import Check, Float64, Window

# What follows a gradient from step to step, the nearest to `backward` first: clipping bounds the
# last.
_GRADIENTS = ("grad_norm_canary", "grad_norm")
# What says how good the answers are, whatever the loss is multiplied with.
_BESIDE = ("explained_deviance", "accuracy")
# Median absolute deviation of a normal distribution, in standard deviations; and by how much a
# median scatters more than a mean (the root of pi / 2).
_MAD, _MEDIAN = 0.6745, 1.2533


@dataclass(frozen=True, slots=True)
class RescaledPolicy(Policy):
    """Thresholds of `loss.rescaled`.

    Attributes:
        before: observations before the step. With `after` there are 7.7e7 orders of values that are
            drawn alike, of which one has all of the later ones beyond all of the earlier.
        after: observations from the step on.
        factor: by which loss and gradient norm fall, at the least: what a lower learning rate or
            another batch size does to a loss within a step stays far below.
        jump: size of the step itself, over the largest move of those before: what falls fast does
            not fall by that from one step to the next.
        same: distance of the two logarithms up to which they are of one factor, as a share of
            the change.
        same_noise: standard errors of that distance which are allowed for besides.
        beside: observations of what the factor leaves alone, before and after each, where the loss
            rises.
        unmoved: rise of the unexplained deviance on the logarithm, as a share of that of the loss,
            and change of the accuracy, up to which they are left alone: with harder data the one
            rises as the loss does, and answers are wrong.
        right: accuracy before that can come down.
    """

    before: Observations = 32
    after: Observations = 8
    factor: Times = 4.0
    jump: Times = 2.0
    same: Share = 0.05
    same_noise: Sigmas = 3.0
    beside: Observations = 2
    unmoved: Share = 0.1
    right: Share = 0.2


@dataclass(frozen=True, slots=True)
class Rescaling:
    """What is known of one.

    Attributes:
        loss, gradient: by how much each is multiplied.
        series: name of the gradient norm.
        level: logarithm of the loss before, float64 [R].
        agreed_until: step of the last observation before.
        phase: what says that a new phase has begun; empty for nothing.
    """

    loss: float
    gradient: float
    series: str
    level: Float64
    agreed_until: int
    phase: str


@dataclass(slots=True)
class RescaledState:
    """What is remembered: steps, logarithms of the loss [R] and of the gradient norm.

    Attributes:
        beside: what says how good the answers are, by step.
    """

    steps: deque[int] = field(default_factory=deque)
    losses: deque[Float64] = field(default_factory=deque)
    norms: deque[float] = field(default_factory=deque)
    series: str = ""
    beside: dict[str, dict[int, float]] = field(
        default_factory=lambda: {name: {} for name in _BESIDE}
    )
    phases: Phases = field(default_factory=Phases)
    watch: Watch[Rescaling] = field(default_factory=Watch)


class LossRescaled(Detector[RescaledState]):
    """The loss is a fraction of what it was from one step on, and its gradient the same fraction.

    A divisor, a weight or a reduction changed: the model is the same, and so are the data. With SGD
    it is another learning rate; with Adam only what is reported changes, and clipping. A loss that
    rises by a factor may be one of harder data (a classifier's gradient is in proportion to its
    loss where that is small), unless the answers are as good as before.

    Statistic:
        The logarithms of every rank's loss and of the gradient norm (of a few small tensors at
        every recorded step, else of all). The 8 observations from a step on are below all of the 32
        before it, in both and on every rank; the step itself is twice the largest move before it;
        both fall to a quarter or less, and by the same factor: their logarithms (medians of 8)
        differ by 0.05 of the change or less, and 3 standard errors (median absolute deviation of
        the moves). Likewise above, where `explained_deviance` or `accuracy` are known at 2 of both
        and stay: the unexplained share does not rise by a tenth of the loss's factor on the
        logarithm, the accuracy, of 0.2 and more, not by a tenth. Over when 8 observations are
        nearer to the level before.

    Severity:
        Warning; info where the data became others at that step, or a mark was set.

    Evidence:
        `factor` (of the loss), `gradient_factor`, `series`, `agreed_until`.

    Source:
        The gradient is linear in the loss: what multiplies the one multiplies the other. Orders of
        values that are drawn alike are equally likely (rank test of Wilcoxon, 1945, at its
        extreme).
    """

    kinds = ("loss.rescaled",)
    of_one_task = True
    needs = ("loss",)
    wants = (*_GRADIENTS, *_BESIDE, *Phases.SERIES)
    effects = (
        Rule(
            root=("loss.rescaled",),
            consequence=("loss.", "gradient.", "clipping.", "lr.", "update.", "metric.anomaly"),
            earliest=-BLUR,
            latest=EPISODE,
            why="what is minimised is another multiple of the loss",
        ),
    )
    policy: RescaledPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """A number that is multiplied with from one step on mostly stays."""
        return (Reach(("loss",), self.policy.after, lasts=1.0),)

    def start(self) -> RescaledState:
        """Nothing seen yet."""
        state = RescaledState()
        state.watch.clear_after = self.policy.after
        return state

    def advance(self, window: Window, state: RescaledState) -> Outcome:
        """Takes the steps at which both are known."""
        state.phases.take(window)
        oldest = next(iter(state.steps), int(window.steps[0]) if len(window.steps) else 0)
        for name, known in state.beside.items():
            known.update(mean_by_step(window, name))
            for old in [at for at in known if at < oldest]:
                del known[old]
        for step, losses, norm in _paired(window, state):
            episode = state.watch.open(step)
            if episode is not None:
                self._follow(state, episode, step, losses)
                continue
            if state.losses and len(state.losses[-1]) != len(losses):
                _forget(state)
            state.steps.append(step)
            state.losses.append(losses)
            state.norms.append(norm)
            if len(state.steps) < self.policy.before + self.policy.after:
                continue
            found = self._found(state)
            at = state.steps[self.policy.before]
            if found is None:
                state.watch.good(at)
                state.steps.popleft()
                state.losses.popleft()
                state.norms.popleft()
            else:
                state.watch.bad(step, found, first_step=at)
                _forget(state)
        findings = [_finding(e) for e in state.watch.take(window.last_step)]
        return Outcome({"loss.rescaled": self._check(state)}, tuple(findings))

    def _found(self, state: RescaledState) -> Rescaling | None:
        policy = self.policy
        norms, losses = np.array(state.norms), np.stack(state.losses)
        n = policy.before
        # Nearly every step stops here.
        if abs(norms[n - 1] - norms[n]) < math.log(policy.factor) / 2:
            return None
        rises = norms[n] > norms[n - 1]
        both = np.column_stack([losses, norms]) * (-1 if rises else 1)
        early, late = both[:n], both[n:]
        if not (late.max(axis=0) < early.min(axis=0)).all():
            return None
        moves = np.abs(np.diff(early, axis=0))
        if not ((early[-1] - late[0]) > policy.jump * moves.max(axis=0)).all():
            return None
        changes = np.median(early[-policy.after :], axis=0) - np.median(late, axis=0)
        if changes.min() < math.log(policy.factor):
            return None
        # A move is the difference of two values.
        scatter = np.median(moves, axis=0) / _MAD / math.sqrt(2)
        error = _MEDIAN * math.sqrt(2 / policy.after) * math.hypot(scatter[:-1].max(), scatter[-1])
        apart = np.abs(changes[:-1] - changes[-1]).max()
        if apart > policy.same * changes[-1] + policy.same_noise * error:
            return None
        # Of so wide a margin nothing could be said.
        if policy.same_noise * error > 0.5 * changes[-1]:
            return None
        if rises and not self._unmoved(state, float(np.median(changes[:-1]))):
            return None
        steps, sign = list(state.steps), 1 if rises else -1
        return Rescaling(
            loss=math.exp(sign * float(np.median(changes[:-1]))),
            gradient=math.exp(sign * float(changes[-1])),
            series=state.series,
            level=np.median(losses[n - policy.after : n], axis=0),
            agreed_until=steps[n - 1],
            phase=state.phases.began(steps[n], steps[-1]),
        )

    def _unmoved(self, state: RescaledState, change: float) -> bool:
        """Whether the answers are known to be as good as before.

        Args:
            change: of the logarithm of the loss.
        """
        policy, steps = self.policy, list(state.steps)
        for name, known in state.beside.items():
            parts = steps[: policy.before], steps[policy.before :]
            early, late = ([known[at] for at in part if at in known] for part in parts)
            if min(len(early), len(late)) < policy.beside:
                continue
            before, after = float(np.median(early)), float(np.median(late))
            if name == "accuracy":
                return before >= policy.right and abs(after - before) <= policy.unmoved
            return (
                max(before, after) < 1
                and math.log((1 - after) / (1 - before)) <= policy.unmoved * change
            )
        return False

    def _follow(
        self, state: RescaledState, episode: Episode[Rescaling], step: int, losses: Float64
    ) -> None:
        facts = episode.facts
        if len(losses) != len(facts.level):
            state.watch.good(step)
            return
        # How much of the way it has gone.
        share = float(np.median(losses - facts.level)) / math.log(facts.loss)
        if share > 0.5:
            state.watch.bad(step, facts)
        else:
            state.watch.good(step)

    def _check(self, state: RescaledState) -> Check:
        if not state.series:
            return Check.insufficient("No gradient norm is known beside the loss.")
        if not state.watch.judged:
            need = self.policy.before + self.policy.after
            return Check.insufficient(
                f"{count(len(state.steps), 'observation')} of {need} needed, with a gradient norm."
            )
        return Check.ok(
            f"{count(state.watch.judged, 'step')} judged: loss and gradient norm never changed by "
            "one factor."
        )


def _paired(window: Window, state: RescaledState) -> list[tuple[int, Float64, float]]:
    """Steps, logarithms of the ranks' losses, and that of the gradient norm."""
    steps, losses = rank_rows(window, "loss")
    known: Mapping[int, Float64] = {}
    for name in (state.series,) if state.series else _GRADIENTS:
        known = rows_by_step(window, name)
        if known:
            state.series = name
            break
    found = []
    for step, row in zip(steps.tolist(), losses, strict=True):
        norm = known.get(step)
        if norm is None:
            continue
        # Of what is not positive there is no logarithm; a rank that says nothing is in no order.
        norm = norm[np.isfinite(norm) & (norm > 0)]
        if len(norm) and np.isfinite(row).all() and (row > 0).all():
            found.append((step, np.log(row), float(np.log(np.median(norm)))))
    return found


def _forget(state: RescaledState) -> None:
    for known in (state.steps, state.losses, state.norms):
        known.clear()


def _finding(episode: Episode[Rescaling]) -> Finding:
    facts, first = episode.facts, episode.first_step
    times = f"{number(facts.loss)} times"
    everywhere = if_several(len(facts.level), "of every rank")
    return Finding(
        kind="loss.rescaled",
        key="loss",
        severity="info" if facts.phase else "warning",
        title=f"From step {first} on the loss is {times} what it was, and so is its gradient",
        seen_step=episode.seen_step,
        last_step=episode.last_step,
        first_step=first,
        cause=sentences(
            f"From one step to the next the loss{everywhere} became {times} what it was, and the "
            f"gradient norm {number(facts.gradient)} times: one factor, as where the loss is "
            "multiplied by a number. A mean in place of a sum or the other way round, a "
            "divisor (samples, tokens, accumulated batches), a weight or a loss scale changed.",
            "With SGD that is as many times the learning rate; under Adam, weight decay and "
            "clipping weigh otherwise against the loss.",
            facts.phase,
        ),
        remedy=(
            f"Look at what the loss is multiplied with or divided by from step {first} on. "
            "Nothing, if that is meant and the learning rate fits."
        ),
        clear_after=episode.clear_after,
        evidence={
            "factor": facts.loss,
            "gradient_factor": facts.gradient,
            "series": facts.series,
            AGREED_UNTIL: facts.agreed_until,
        },
    )
