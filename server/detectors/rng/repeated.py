"""Random numbers that are the same at every step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from rankscope.server.detectors.base import TO_THE_END, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.detectors.mechanisms.wording import count, ranks
from rankscope.server.detectors.policy import Observations, Policy
from rankscope.server.window import Check, Window

_REPEATS = "rng_repeats"


@dataclass(frozen=True, slots=True)
class RepeatedPolicy(Policy):
    """Thresholds of `rng.repeated`.

    Attributes:
        in_a_row: consecutive steps with the seed of the one before: some warm up or try out a
            model with one seed, for a few steps.
    """

    in_a_row: Observations = 8


@dataclass(slots=True)
class Repeated:
    """What was seen.

    Attributes:
        ranks: those that repeat; empty for all.
        times: steps in a row.
    """

    ranks: tuple[int, ...]
    times: int


@dataclass(slots=True)
class RepeatedState:
    """What `rng.repeated` remembers."""

    watch: Watch[Repeated] = field(default_factory=lambda: Watch(clear_after=8))


class RandomRepeated(Detector[RepeatedState]):
    """Every step draws the random numbers of the one before.

    `torch.manual_seed` is called with the same seed in each step, as where a function that wants
    reproducible numbers of its own seeds the generator of all. Dropout leaves out the same units
    each time, noise is a constant that the model learns, the same positions are masked, and what
    is left of the loss is lower than it should be.

    Statistic:
        Steps in a row that gave the generator the seed of the step before, and drew numbers from it
        (`rng_repeats`): 8 or more on any rank. Since the first of them. Over after 8 steps without.

    Severity:
        Warning.

    Evidence:
        `steps` (in a row, at the last sample).

    Source:
        The generator's own state, read after the step, beside that of a new one with its seed.
    """

    kinds: ClassVar[tuple[str, ...]] = ("rng.repeated",)
    wants: ClassVar[tuple[str, ...]] = (_REPEATS,)

    policy: RepeatedPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """One sample suffices: it counts the steps between."""
        return (Reach((_REPEATS,), 1, TO_THE_END),)

    def advance(self, window: Window, state: RepeatedState) -> Outcome:
        """Goes through the samples."""
        for step, row in zip(*rank_rows(window, _REPEATS), strict=True):
            repeating = row >= self.policy.in_a_row  # never where a rank posted nothing
            if not repeating.any():
                state.watch.good(int(step))
                continue
            times = int(row[repeating].max())
            others = np.isfinite(row) & ~repeating
            who = tuple(window.ranks[repeating].tolist()) if others.any() else ()
            facts = Repeated(who, times)
            first = max(int(step) - times, 0)
            state.watch.bad(int(step), facts, first_step=first).facts = facts
        findings = tuple(_finding(e) for e in state.watch.take(window.last_step))
        return Outcome({"rng.repeated": _check(state)}, findings)


def _check(state: RepeatedState) -> Check:
    if not state.watch.judged:
        return Check.not_applicable("`torch.manual_seed` is not called within the steps.")
    samples = count(state.watch.judged, "sampled step")
    return Check.ok(f"No seed came again and again with numbers drawn from it, at {samples}.")


def _finding(episode: Episode[Repeated]) -> Finding:
    facts, step = episode.facts, episode.first_step
    who = f" on {ranks(facts.ranks)}" if facts.ranks else ""
    return episode.finding(
        kind="rng.repeated",
        severity="warning",
        title=f"Every step draws the same random numbers{who} since step {step}",
        ranks=facts.ranks,
        cause=(
            "`torch.manual_seed` is called with one and the same seed in each step, and numbers "
            "are drawn from the generator after it: dropout leaves out the same units each time, "
            "noise is a constant that the model learns, the same places are masked. The loss then "
            "falls lower than it should, and evaluations do not follow."
        ),
        remedy=(
            "Look for `manual_seed` in what the loop calls (the model's `forward`, an "
            "augmentation, a function that samples). What needs numbers of its own draws them from "
            "a `torch.Generator` of its own, or inside `torch.random.fork_rng()`."
        ),
        evidence={"steps": facts.times},
    )
