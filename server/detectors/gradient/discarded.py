"""Gradients that are thrown away before any optimizer has stepped with them."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from rankscope.server.detectors.base import LASTS_SAMPLED, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.series_by_step import median, together
from rankscope.server.detectors.mechanisms.waiting import too_few
from rankscope.server.detectors.mechanisms.wording import count, number, percent
from rankscope.server.detectors.policy import Observations, Policy, Share
from rankscope.server.detectors.profiles import TURNS
from rankscope.server.window import Check, Window


@dataclass(frozen=True, slots=True)
class DiscardedPolicy(Policy):
    """Thresholds of `gradient.discarded`.

    Attributes:
        size: number of most recent sampled steps that are judged; with fewer, the last group of an
            epoch or a repeated pass may be all there is.
        share: share of these steps at which gradients were thrown away, from which on a loop does
            it and not chance.
        meant: smallest number of passes by which the losses are divided that is taken for
            accumulation; a half is part of many losses.
    """

    size: Observations = 40
    share: Share = 0.9
    meant: Observations = 3


@dataclass(slots=True)
class Thrown:
    """Medians over the steps that are judged.

    Attributes:
        discarded: passes thrown away at a step.
        used: passes that an optimizer stepped with.
        divisor: number by which the losses of all passes were divided; NaN for none.
    """

    discarded: float
    used: float
    divisor: float


@dataclass(slots=True)
class DiscardedState:
    """What `gradient.discarded` remembers.

    Attributes:
        recent: of the last steps, passes thrown away and used, and what losses were divided by.
    """

    recent: deque[tuple[int, float, float, float]]
    turns: bool = False
    watch: Watch[Thrown] = field(default_factory=lambda: Watch(clear_after=40))


class GradientDiscarded(Detector[DiscardedState]):
    """Backward passes whose gradients no optimizer uses, at nearly every step, on all ranks.

    A loop over micro-batches that calls `zero_grad` at each of them keeps the last one; one that
    calls it at every iteration and steps at every tenth throws nine of ten batches away. Both
    learn, from a part of the data, at the price of all of them.

    Statistic:
        Of the last 40 sampled steps at least 90 % have `passes_discarded` above 0: gradients were
        there and were set to zero, or replaced, before the optimizer stepped. Not where several
        optimizers step in turns: each throws away what another one's loss has left. Where it is
        one rank alone, `desync.progress` reports it.

    Severity:
        Info: sharpness-aware steps and adversarial examples need passes of that sort. Warning where
        each loss was divided by the number of all passes, three or more: they were meant to add
        up, and the steps are too small as well.

    Evidence:
        `discarded` and `used` (passes of a step, medians), `share` (of all passes), `divisor` (of
        the losses, null for none).

    Source:
        The loop that PyTorch's recipe for gradient accumulation warns of.
    """

    kinds = ("gradient.discarded",)
    needs = ("loss",)
    wants = ("passes_discarded", "micro_steps", "loss_divisor")

    policy: DiscardedPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Steps that throw gradients away, as many as are judged at a time."""
        return (Reach(self.needs, self.policy.size, LASTS_SAMPLED),)

    def start(self) -> DiscardedState:
        """Nothing seen yet."""
        return DiscardedState(deque(maxlen=self.policy.size))

    def advance(self, window: Window, state: DiscardedState) -> Outcome:
        """Counts the passes of each step."""
        state.turns |= any(event.kind == TURNS for event in window.events)
        for step, row in together(window, *self.needs, *self.wants):
            if "loss" not in row:
                continue
            discarded = row.get("passes_discarded", 0.0)
            divisor = row.get("loss_divisor", math.nan)
            state.recent.append((step, discarded, row.get("micro_steps", 1.0), divisor))
            some = _throwing(state)
            full = len(state.recent) == self.policy.size
            if state.turns or not full or some < self.policy.share * self.policy.size:
                state.watch.good(step)
                continue
            facts = Thrown(
                median([thrown for _, thrown, _, _ in state.recent]),
                median([used for _, _, used, _ in state.recent if math.isfinite(used)]),
                median([by for _, _, _, by in state.recent if math.isfinite(by)] or [math.nan]),
            )
            first = next(at for at, thrown, _, _ in state.recent if thrown > 0)
            state.watch.bad(step, facts, first_step=first).facts = facts
        meant = self.policy.meant
        findings = tuple(_finding(e, meant) for e in state.watch.take(window.last_step))
        return Outcome({"gradient.discarded": self._check(state)}, findings)

    def _check(self, state: DiscardedState) -> Check:
        if state.turns:
            why = "Several optimizers step in turns: each throws away what another's loss has left."
            return Check.not_applicable(why)
        if len(state.recent) < self.policy.size:
            return too_few(len(state.recent), "sampled step", self.policy.size)
        steps = count(len(state.recent), "sampled step")
        return Check.ok(f"{_throwing(state):,} of {steps} threw gradients away.")


def _throwing(state: DiscardedState) -> int:
    return sum(thrown > 0 for _, thrown, _, _ in state.recent)


def _finding(episode: Episode[Thrown], meant: int) -> Finding:
    facts = episode.facts
    whole = facts.discarded + facts.used
    share = facts.discarded / whole if whole else 0.0
    # The loss as it is posted has 32 bits, and so has its divisor.
    adds_up = whole >= meant and math.isclose(facts.divisor, whole, rel_tol=1e-6)
    divided = (
        f" Each loss is divided by {number(whole)}, the number of all passes: they were meant to "
        "add up, and the steps are smaller than they should be by that factor."
        if adds_up
        else ""
    )
    return episode.finding(
        kind="gradient.discarded",
        severity="warning" if adds_up else "info",
        title=(
            f"{number(facts.discarded)} of {number(whole)} backward passes of a step have been "
            f"thrown away since step {episode.first_step}"
        ),
        cause=(
            f"{percent(share)} of the gradients are set to zero before the optimizer has stepped "
            "with them. Usual causes: `zero_grad()` inside the loop over micro-batches, so that "
            "only the last one counts, or `optimizer.step()` at some iterations only and "
            f"`zero_grad()` at all of them.{divided}"
        ),
        remedy=(
            "Call `zero_grad()` once for each `optimizer.step()`, right after it or before the "
            "first micro-batch. Nothing, if the passes are meant to be thrown away "
            "(sharpness-aware minimisation, adversarial examples)."
        ),
        evidence={
            "discarded": facts.discarded,
            "used": facts.used,
            "share": share,
            "divisor": None if math.isnan(facts.divisor) else facts.divisor,
        },
    )
