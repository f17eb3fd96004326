"""A learning rate that has come to its end long before the training has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from rankscope.server.detectors.base import Check, Detector, Finding, Outcome, Status
from rankscope.server.detectors.episode import Episode, Watch
from rankscope.server.detectors.statistics import rank_rows
from rankscope.server.detectors.wording import count, number
from rankscope.server.window import Window

_GRACE = 20
# A rate this far below its largest is none.
_NOTHING = 1e-6
# Steps without one: a last step with a rate of 0 is how many schedules end.
_AT_LEAST = 10
_SHARE = 0.05


@dataclass(slots=True)
class Ended:
    """A schedule that has ended.

    Attributes:
        began: first step at which a rate was seen.
        highest: the largest until then.
    """

    began: int
    highest: float


@dataclass(slots=True)
class ScheduleState:
    """What is remembered of the learning rate, the largest of all groups and ranks."""

    steps: int = 0
    judged: int = 0
    first: int = -1
    highest: float = 0.0
    nothing_since: int = -1
    watch: Watch[Ended] = field(default_factory=lambda: Watch(clear_after=8))


class ScheduleMismatch(Detector[ScheduleState]):
    """The learning rate has fallen to nothing, and training goes on.

    A schedule was made for fewer steps than are taken: it advances once for each rank or each
    micro-batch, or was given the length of one epoch.

    Statistic:
        A learning rate below a millionth of its largest for 10 steps and a twentieth of the steps
        before them, on every rank. How often a scheduler advanced cannot be seen: one that merely
        runs too fast is found when it has come to its end.

    Severity:
        Warning.

    Evidence:
        `ended_step`, `steps_without`, `lr_highest`, `world_size`.

    Source:
        huggingface/accelerate#1398 and others: a scheduler stepped by every process.
    """

    kinds: ClassVar[tuple[str, ...]] = ("schedule.mismatch",)
    needs: ClassVar[tuple[str, ...]] = ("lr",)

    def start(self) -> ScheduleState:
        """Nothing seen yet."""
        return ScheduleState()

    def advance(self, window: Window, state: ScheduleState) -> Outcome:
        """Follows the learning rate."""
        state.steps += len(window.steps)
        steps, rows = rank_rows(window, "lr")
        for step, rates in zip(steps.tolist(), np.nanmax(rows, axis=1).tolist(), strict=True):
            state.first = step if state.first < 0 else state.first
            state.judged += 1
            if rates > _NOTHING * state.highest:
                state.highest = max(state.highest, rates)
                state.nothing_since = -1
                state.watch.good(step)
                continue
            if state.highest <= 0:
                continue  # a warm-up that begins with 0
            since = state.nothing_since = step if state.nothing_since < 0 else state.nothing_since
            if step - since + 1 >= max(_AT_LEAST, _SHARE * (since - state.first)):
                state.watch.bad(step, Ended(state.first, state.highest), first_step=since)
        findings = tuple(_finding(e, window) for e in state.watch.take(window.last_step))
        return Outcome({"schedule.mismatch": _check(window, state)}, findings)


def _finding(episode: Episode[Ended], window: Window) -> Finding:
    ended, step = episode.facts, episode.first_step
    length = step - ended.began
    planned = (
        f" A schedule for {length * window.world_size:,} steps that advances once for each of the "
        f"{window.world_size} ranks would have ended there."
        if window.world_size > 1
        else ""
    )
    return Finding(
        kind="schedule.mismatch",
        severity="warning",
        title=f"The learning rate has been 0 since step {step}, and training goes on",
        seen_step=episode.seen_step,
        last_step=episode.last_step,
        first_step=step,
        ranks=tuple(int(r) for r in window.ranks),
        stage="hyperparameters",
        cause=(
            f"The learning rate fell from {number(ended.highest)} to nothing within "
            f"{count(length, 'step')} and stays there: the steps since change nothing. The "
            "schedule was made for fewer steps than are taken, or advances more than once a step."
            f"{planned}"
        ),
        remedy=(
            "Call `scheduler.step()` once an optimizer step, and give the schedule the number of "
            "optimizer steps of the whole training (a wrapper that steps it once a process needs "
            "that times the world size)."
        ),
        clear_after=episode.clear_after,
        evidence={
            "ended_step": step,
            "steps_without": episode.last_step - step + 1,
            "lr_highest": ended.highest,
            "world_size": window.world_size,
        },
    )


def _check(window: Window, state: ScheduleState) -> Check:
    episode = state.watch.open(window.last_step)
    if episode is not None:
        return Check(Status.OPEN, f"{_finding(episode, window).title}.")
    if state.judged < _GRACE:
        return Check(Status.INSUFFICIENT_DATA, f"{count(state.judged, 'learning rate')} so far.")
    return Check(
        Status.OK,
        f"The learning rate has not come to its end in {count(state.judged, 'step')}; how often a "
        "scheduler advances cannot be seen.",
    )
