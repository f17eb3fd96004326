"""A schedule that does not go with the steps: it advances too often, or has come to its end."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import TO_THE_END, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.recurrence import detrended, folded
from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.detectors.mechanisms.waiting import GRACE
from rankscope.server.detectors.mechanisms.wording import count, if_several, number
from rankscope.server.detectors.policy import Count, Policy, Share, Steps, Times
from rankscope.server.window import Check, Window

_WRAPPED = "scheduler.wrapped"
# Rates in which a period is looked for: of up to a sixth of them, 10 steps.
_RATES = 64
# Share of the scatter that a period explains: a rate has no noise, and is periodic or is not.
_EXACT = 0.95


@dataclass(frozen=True, slots=True)
class SchedulePolicy(Policy):
    """Thresholds of `schedule.mismatch`.

    Attributes:
        nothing: rate as a share of the highest, up to which it counts as 0.
        at_least: smallest number of steps with a rate of 0 that is reported: many schedules end
            with one.
        share: smallest share of all steps that had a rate of 0.
        little: rate as a share of the highest, up to which it changes almost nothing: a schedule
            that falls by steps has its last ones there.
        long: steps at such rates over those before, from which on it is reported.
        long_steps: smallest number of steps at such rates that is.
        looks: consecutive samples at which the schedule was too fast, before it is reported.
        looked: smallest number of steps over which these samples extend.
        alternating: largest over smallest rate of a period of a few steps, from which on it is no
            rounding; as for a rise of the rate.
    """

    nothing: Share = 1e-6
    at_least: Steps = 10
    share: Share = 0.05
    little: Share = 0.01
    long: Times = 4.0
    long_steps: Steps = 64
    looks: Count = 3
    looked: Count = 4
    alternating: Times = 1.5


@dataclass(slots=True)
class Ended:
    """A schedule that has ended.

    Attributes:
        began: first step at which a rate was seen.
        highest: the largest until then.
        newest: what is left of it.
    """

    began: int
    highest: float
    newest: float = 0.0


@dataclass(slots=True)
class Fast:
    """A schedule that advances more than once a step.

    Attributes:
        times: how often.
        micro: passes backward a step; 0 where not known.
        wrapped: whether Accelerate has it do so.
    """

    times: int
    micro: int
    wrapped: bool


@dataclass(slots=True)
class Alternates:
    """A rate that goes to and fro within a few steps: its period, smallest and largest."""

    period: int
    low: float
    high: float


@dataclass(slots=True)
class ScheduleState:
    """What is remembered of the learning rate, the largest of all groups and ranks.

    Attributes:
        counts: rank -> step and `scheduler_steps` when it was examined last.
        times: how often the schedule has advanced a step since `times_since`, at `samples` samples.
        micro: newest number of passes backward a step.
    """

    steps: int = 0
    judged: int = 0
    first: int = -1
    highest: float = 0.0
    nothing_since: int = -1
    little_since: int = -1
    watch: Watch[Ended] = field(default_factory=lambda: Watch(clear_after=8))
    counts: dict[int, tuple[int, float]] = field(default_factory=dict)
    times: int = 0
    times_since: int = 0
    samples: int = 0
    steps_seen: int = 0
    micro: int = 0
    wrapped: bool = False
    rates: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_RATES))
    alternates: Watch[Alternates] = field(default_factory=lambda: Watch(clear_after=_RATES))
    fast: Watch[Fast] = field(default_factory=lambda: Watch(clear_after=8))


class ScheduleMismatch(Detector[ScheduleState]):
    """A schedule that advances too often, goes to and fro, or has ended while training goes on.

    A schedule was made for fewer steps than are taken: it advances once for each rank or each
    micro-batch, or was given the length of one epoch.

    Statistic:
        `scheduler_steps` over optimizer steps between two samples: the same whole number above 1 on
        every rank at 3 samples in a row and over 4 steps. Or a learning rate below a millionth of
        its largest for 10 steps and a twentieth of the steps before them, on every rank; or below a
        hundredth of it for 64 steps and 4 times as many as came before them. A schedule
        that is no scheduler of torch is not counted: it is found when it has come to its end. Or a
        rate that has a period of 2 to 10 steps: in 64 consecutive ones the place within it explains
        95 % of the scatter (epoch folding), and the largest is 1.5 times the smallest.

    Severity:
        Warning for one that has ended, for one that goes to and fro, and for one that advances once
        a step for each rank; info where that is how often there is a micro-batch, where Accelerate
        does it by design, and for other numbers: the schedule may be made for it.

    Evidence:
        `times` (advances a step) or `ended_step`, `steps_without`, `lr_highest`; `world_size`. Of
        one that goes to and fro `period`, `lr_low`, `lr_high`.

    Source:
        huggingface/accelerate#1398 and others: a scheduler stepped by every process.
    """

    kinds = ("schedule.mismatch",)
    needs = ("lr",)
    wants = ("scheduler_steps", "micro_steps")

    policy: SchedulePolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Consecutive learning rates that are as good as zero."""
        return (Reach(self.needs, GRACE, TO_THE_END),)

    def advance(self, window: Window, state: ScheduleState) -> Outcome:
        """Follows the learning rate."""
        state.steps += len(window.steps)
        steps, rows = rank_rows(window, "lr")
        for step, rates in zip(steps.tolist(), np.nanmax(rows, axis=1).tolist(), strict=True):
            if not math.isfinite(rates):
                continue
            state.first = step if state.first < 0 else state.first
            state.judged += 1
            self._alternate(step, rates, state)
            if rates > self.policy.nothing * state.highest:
                state.highest = max(state.highest, rates)
                state.nothing_since = -1
                self._little(step, rates, state)
                continue
            since = state.nothing_since = step if state.nothing_since < 0 else state.nothing_since
            least = max(self.policy.at_least, self.policy.share * (since - state.first))
            if state.highest <= 0:
                least = self.policy.long_steps  # a warm-up that begins with 0
            if step - since + 1 >= least:
                state.watch.bad(step, Ended(state.first, state.highest), first_step=since)
        state.wrapped |= any(e.kind == _WRAPPED for e in window.events)
        micro = rank_rows(window, "micro_steps")
        for step, counts in zip(*rank_rows(window, "scheduler_steps"), strict=True):
            passes = micro[1][: int(np.searchsorted(micro[0], step, side="right"))]
            if len(passes) and not np.isnan(passes[-1]).all():
                state.micro = int(np.nanmax(passes[-1]))
            reported = {
                int(r): float(c) for r, c in zip(window.ranks, counts, strict=True) if c == c
            }
            self._count(window, state, int(step), reported)
        fast = [_too_fast(e, window) for e in state.fast.take(window.last_step)]
        ended = [_finding(e, window) for e in state.watch.take(window.last_step)]
        # That it has ended follows from it.
        serious = any(finding.severity == "warning" for finding in fast)
        alternates = [_alternates(e) for e in state.alternates.take(window.last_step)]
        findings = (*fast, *(() if serious else ended), *alternates)
        return Outcome({"schedule.mismatch": _check(state)}, findings)

    def _little(self, step: int, rate: float, state: ScheduleState) -> None:
        """Whether nearly all of a training has a rate that is negligible beside its largest."""
        policy = self.policy
        if rate > policy.little * state.highest:
            state.little_since = -1
            state.watch.good(step)
            return
        since = state.little_since = step if state.little_since < 0 else state.little_since
        least = max(policy.long_steps, policy.long * (since - state.first))
        if step - since + 1 >= least:
            ended = Ended(state.first, state.highest, rate)
            state.watch.bad(step, ended, first_step=since).facts.newest = rate

    def _alternate(self, step: int, rate: float, state: ScheduleState) -> None:
        """Whether the rates of the last steps go to and fro."""
        state.rates.append((step, rate))
        if len(state.rates) < _RATES or state.judged % (_RATES // 4):
            return
        rates = np.array([value for _, value in state.rates])
        consecutive = step - state.rates[0][0] == _RATES - 1
        if (
            not consecutive
            or rates.min() <= 0
            or rates.max() < self.policy.alternating * rates.min()
        ):
            state.alternates.good(step)
            return
        logs = np.log(rates)
        # A staircase is periodic as well without its trend, and never comes back.
        rises = float((logs - np.minimum.accumulate(logs)).max())
        falls = float((np.maximum.accumulate(logs) - logs).max())
        if min(rises, falls) < math.log(self.policy.alternating):
            state.alternates.good(step)
            return
        found = folded(detrended(_RATES) @ logs)
        low = high = 1.0
        if found is not None:
            low, high = math.exp(found.profile.min()), math.exp(found.profile.max())
        if found is None or found.share < _EXACT or high < self.policy.alternating * low:
            state.alternates.good(step)
            return
        last = rates[-found.length :]
        facts = Alternates(found.length, float(last.min()), float(last.max()))
        state.alternates.bad(step, facts, first_step=state.rates[0][0]).facts = facts

    def _count(
        self, window: Window, state: ScheduleState, step: int, reported: dict[int, float]
    ) -> None:
        """Compares how often the schedule has advanced with the steps since the last sample."""
        times: set[float] = set()
        earliest = step
        for rank, advanced in reported.items():
            before, state.counts[rank] = state.counts.get(rank), (step, advanced)
            if before is not None and before[0] < step and before[1] <= advanced:
                times.add((advanced - before[1]) / (step - before[0]))
                earliest = min(earliest, before[0])
        if not times:
            return
        number = times.pop()
        if times or number < 2 or number != int(number):
            state.samples = 0
            state.fast.good(step)
            return
        if not state.samples or state.times != number:
            state.times, state.samples, state.steps_seen = int(number), 0, 0
            # From the first step on, where it adds up: counting began before the first sample.
            first = min(c for _, c in state.counts.values()) - number * (step - earliest)
            state.times_since = earliest if first != number * earliest else 0
        state.samples += 1
        state.steps_seen += step - earliest
        if state.samples >= self.policy.looks and state.steps_seen >= self.policy.looked:
            facts = Fast(int(number), state.micro, state.wrapped)
            state.fast.bad(step, facts, first_step=state.times_since)


def _too_fast(episode: Episode[Fast], window: Window) -> Finding:
    fast, step, size = episode.facts, episode.first_step, window.world_size
    each, meant = "", True
    if fast.times == size > 1:
        each, meant = " once for each rank", fast.wrapped or fast.micro == size
    if fast.micro == fast.times:
        each += f"{' or' if each else ''} once for each micro-batch"
    design = (
        " Accelerate does so by design: schedules are to be given the steps of one process."
        if fast.wrapped
        else ""
    )
    return episode.finding(
        kind="schedule.mismatch",
        key="fast",
        severity="info" if meant else "warning",
        title=f"The schedule advances {fast.times} times at every optimizer step"
        + (f" ({each.strip()})" if each else ""),
        ranks=tuple(int(r) for r in window.ranks),
        stage="hyperparameters",
        cause=(
            f"Since step {step}, `scheduler.step()` is called {fast.times} times between two "
            f"optimizer steps,{each or ' the same number every time'}"
            f"{if_several(size, 'on every rank', before=', ')}. A schedule of N steps "
            f"is over after N / {fast.times}, warm-up included.{design}"
        ),
        remedy=(
            "Call `scheduler.step()` once an optimizer step: not in the loop over micro-batches, "
            "and not by hand where a wrapper does it. Or give the schedule "
            f"{fast.times} times the number of optimizer steps."
        ),
        evidence={
            "times": fast.times,
            "micro_steps": fast.micro,
            "world_size": size,
            "wrapped": fast.wrapped,
        },
    )


def _alternates(episode: Episode[Alternates]) -> Finding:
    facts = episode.facts
    return episode.finding(
        kind="schedule.mismatch",
        key="alternates",
        severity="warning",
        title=(
            f"The learning rate goes from {number(facts.low)} to {number(facts.high)} and back "
            f"within {count(facts.period, 'step')}, again and again"
        ),
        stage="hyperparameters",
        cause=(
            f"It has had a period of {count(facts.period, 'step')} for {_RATES} steps at least. "
            "Cycles and restarts that are meant last for hundreds. Two schedulers set it in turns, "
            "one is called with a wrong count, or a cycle that is given in epochs goes by steps."
        ),
        remedy=(
            "Let one scheduler alone set the rate of an optimizer, and give it its cycle in the "
            "unit in which it is called."
        ),
        evidence={"period": facts.period, "lr_low": facts.low, "lr_high": facts.high},
    )


def _finding(episode: Episode[Ended], window: Window) -> Finding:
    ended, step = episode.facts, episode.first_step
    length = step - ended.began
    left, low, nothing = "0", "nothing", "nothing"
    if ended.newest > 0:
        low, nothing = number(ended.newest), "almost nothing"
        left = f"1/{ended.highest / ended.newest:,.0f} of its largest"
    planned = (
        f" A schedule for {length * window.world_size:,} steps that advances once for each of the "
        f"{window.world_size} ranks would have ended there."
        if window.world_size > 1 and not ended.newest
        else ""
    )
    never = ended.highest <= 0
    return episode.finding(
        kind="schedule.mismatch",
        severity="warning",
        title=f"The learning rate has been {left} since step {step}, and training goes on",
        ranks=tuple(int(r) for r in window.ranks),
        stage="hyperparameters",
        cause=(
            "The learning rate was 0 at every step so far: no step changes anything. The schedule "
            "was restored at its end (a checkpoint of a finished training), was given a length of "
            "0, or multiplies by a factor that begins at 0 and is never advanced."
            if never
            else f"The learning rate fell from {number(ended.highest)} to {low} within "
            f"{count(length, 'step')} and stays there: the steps since change {nothing}. The "
            "schedule was made for fewer steps than are taken, or advances more than once a step."
            f"{planned}"
        ),
        remedy=(
            "Print `optimizer.param_groups[0]['lr']` after the schedule was made, and after what "
            "is restored; call `scheduler.step()` once an optimizer step."
            if never
            else "Call `scheduler.step()` once an optimizer step, and give the schedule the number "
            "of optimizer steps of the whole training (a wrapper that steps it once a process "
            "needs that times the world size)."
        ),
        evidence={
            "ended_step": step,
            "steps_without": episode.last_step - step + 1,
            "lr_highest": ended.highest,
            "world_size": window.world_size,
        },
    )


def _check(state: ScheduleState) -> Check:
    if state.judged < GRACE:
        return Check.insufficient(f"{count(state.judged, 'learning rate')} so far.")
    return Check.ok(
        f"The learning rate has not come to its end in {count(state.judged, 'step')}"
        + (
            ", and its schedule does not advance too often."
            if state.counts
            else "; how often a scheduler advances cannot be seen."
        )
    )
