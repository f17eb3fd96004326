"""Steps that take longer than they did, whichever rank one asks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import TO_THE_END, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.effects import BLUR, Rule
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.statistics import change_point, known_median
from rankscope.server.detectors.mechanisms.wording import count, duration, number, sentences
from rankscope.server.detectors.policy import Count, Observations, Seconds, Times
from rankscope.server.detectors.push.applied import SERIES as APPLIED
from rankscope.server.detectors.rank.lateness import QUEUEING, timed, timed_median
from rankscope.server.detectors.throughput.loading import Loading, LoadingPolicy
from rankscope.server.detectors.throughput.recurring import (
    LongSteps,
    Recurring,
    cause_and_remedy,
    title,
)
from rankscope.server.detectors.throughput.slow_growth import Course
from rankscope.server.window import Check, Float64, Window

_PARTS = ("data_seconds", "compute_seconds", "wait_seconds")
_SIZES = ("samples", "sample_elements", "tokens")
_NAMES = ("step_seconds", *_PARTS, *QUEUEING, *_SIZES)
# Steps between two judgements.
_STRIDE = 8
# Share of a step that its ranks may have waited for a processor: of more the rest is no measure.
_MOST_QUEUED = 0.5
# Columns of what is remembered of a step: its number; its length, the same without what was waited
# for a processor, and the size of its batch, as logarithms; its parts; its length whatever was
# waited for, and how long that was, in seconds.
_STEP, _LENGTH, _ALONE, _SIZE, _FIRST_PART = 0, 1, 2, 3, 4
_SECONDS, _QUEUED = _FIRST_PART + len(_PARTS), _FIRST_PART + len(_PARTS) + 1


@dataclass(frozen=True, slots=True)
class DroppedPolicy(LoadingPolicy):
    """Thresholds of `throughput.dropped`.

    Attributes:
        factor: median length of a step over that before, from which on it is reported. Of 400
            healthy runs on a machine that had other things to do as well none came there.
        apart: the shortest tenth of the steps over the longest tenth before, at the least: so it is
            no more of the long steps that there were before.
        least_seconds: smallest increase. By less a step varies with what else the machine does.
        size: steps that have to be so. Of the same healthy runs 12 and 16 slow steps in a row were
            met in some, 24 in none.
        before: steps before them, at the least: as many.
        memory: steps before them, at the most: what the run did long ago is no measure of today.
        skipped: steps at the beginning that are not counted: caches and connections are made there.
    """

    factor: Times = 1.5
    apart: Times = 1.15
    least_seconds: Seconds = 0.003
    size: Observations = 24
    before: Observations = 24
    memory: Observations = 256
    skipped: Count = 5


@dataclass(slots=True)
class Slowdown:
    """What is known of one.

    Attributes:
        before, now: median seconds of a step before, and since then.
        parts: by how many seconds each part of a step has grown; NaN where it is not known.
        sized: whether it is known how much a step is given.
        creeps: it has grown all the time, and not at one step.
    """

    before: float
    now: float
    parts: dict[str, float]
    sized: bool
    creeps: bool


@dataclass(slots=True)
class DroppedState:
    """What is remembered: the numbers of the last `size` steps, and of those before.

    Attributes:
        recurring: steps that are long at equal distances.
        loading: the time before the first forward pass.
        begin: the first `size` steps that are counted.
        course: of the steps' length without what was waited for a processor, as logarithms.
        whole: the whole step was found to take longer.
        by_pushes: whether a step is the time from one worker's push to the next one's.
        seen, usable: steps that were timed, and those of which the length says something.
    """

    recurring: Recurring
    loading: Loading
    past: deque[list[float]] = field(default_factory=deque)
    recent: deque[list[float]] = field(default_factory=deque)
    begin: list[list[float]] = field(default_factory=list)
    course: Course = field(default_factory=Course)
    by_pushes: bool = False
    seen: int = 0
    usable: int = 0
    judged: int = 0
    tensors: int = 0
    whole: bool = False
    watch: Watch[Slowdown] = field(default_factory=lambda: Watch(clear_after=64))

    def trains(self, tensors: int) -> None:
        """So many tensors have a gradient: more of them take longer."""
        if self.tensors not in (0, tensors):
            self.past.clear()
            self.recent.clear()
            self.begin.clear()
            self.course = Course()
        self.tensors = tensors


class ThroughputDropped(Detector[DroppedState]):
    """Every step takes longer than before, on half of the ranks or more.

    In a synchronous job all wait for the slowest one, and where all are slow alike no comparison of
    ranks shows it: a loader that lost its cache or its workers, devices that are throttled, a
    network or a file system that others use, work that the loop does at every step from some step
    on (a check, logging, a profiler left running).

    Statistic:
        The length of a step (`step_seconds`), median over the ranks, against that of the up to 256
        steps before the last 24. What a rank had to wait for a processor (`queued_seconds`, the
        longest of all ranks, twice: the threads that reduce wait as well) does not count, nor do
        steps of which that is more than half: the machine has too much to do. Reported where the
        median has grown to 1.5 times and by 3 ms,
        and nine in ten steps are longer by 15 % than nine in ten before. Steps may grow with the
        square of the numbers that they are given (`samples` times `sample_elements`, `tokens`):
        attention does. The onset is the change point of the logarithm (least squares). Over when
        the median is nearer to what it was. Where another number of tensors is reduced (layers
        that are trained from there on), what was before is no measure. And steps that are long at
        equal distances: the place within a period of which 6 fit into 64 or 256 steps explains more
        than half of the scatter of the logarithm, beyond chance (`gradient.oscillating`), and what
        the longest take above the others, twice as much and 10 ms, is a third of all time. And the
        time before the first forward pass (`data_seconds`, key `data`), median over the ranks: of
        24 steps 1.5 times that of the up to 256 before and so much more than the computing has
        grown, by a quarter of a step, four in five longer by 15 % than four in five before; or so
        beside the first 24 steps, growing in all eighths of the run.

    Severity:
        Warning. Info for steps that are long at equal distances from the start on: loops that
        collect samples between rounds of steps, or save, and optimizers that prepare something
        every so often are made so. Info for the steps of a parameter server that does not wait for
        its workers: how often somebody pushes is a matter of each of them, of which `push.stale`
        names the slow one.

    Evidence:
        `step_seconds_before`, `step_seconds`, `times`, `creeps`; `more_data_seconds`,
        `more_compute_seconds`, `more_wait_seconds`: by how much each part has grown, where it is
        known; what is known to be waiting is no part of the computing. Of data
        `data_seconds_before`, `data_seconds`, `step_seconds`, `creeps`.

    Source:
        Own history beside the other ranks: NVIDIA's resiliency extension scores a rank against
        both. Fail-slow of all ranks at once: Greyhound (ATC'25).
    """

    kinds = ("throughput.dropped",)
    needs = ("step_seconds",)
    wants = (*_NAMES, APPLIED[0])
    effects = (
        Rule(
            root=("rank.straggler", "rank.starved", "collective.slow"),
            consequence=("throughput.dropped",),
            earliest=-BLUR,
            same_ranks=False,
            why="the step of all ranks is as long as that of the slowest one",
        ),
    )

    policy: DroppedPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """As many steps as have to be slow."""
        return (Reach(("step_seconds",), self.policy.size, TO_THE_END),)

    def start(self) -> DroppedState:
        """Nothing timed yet."""
        return DroppedState(Recurring(self.policy), Loading(self.policy))

    def advance(self, window: Window, state: DroppedState) -> Outcome:
        """Goes through the steps that were timed."""
        policy = self.policy
        state.loading.world = len(window.ranks)
        pushed = window.series.get(APPLIED[0])
        state.by_pushes = state.by_pushes or (pushed is not None and bool(pushed.present.any()))
        reductions = deque(window.reductions)
        for numbers in _numbers(window).tolist():
            step = int(numbers[_STEP])
            while reductions and reductions[0].step <= step:
                state.trains(reductions.popleft().tensor_count)
            state.seen += 1
            if state.seen <= policy.skipped:
                continue
            data, compute = numbers[_FIRST_PART : _FIRST_PART + 2]
            state.loading.push(step, data, compute, numbers[_SECONDS], numbers[_QUEUED])
            if not math.isfinite(numbers[_LENGTH]):
                continue
            state.usable += 1
            if not state.by_pushes:
                state.recurring.push(step, math.exp(numbers[_ALONE]), data)
            state.recent.append(numbers)
            state.course.push(numbers[_ALONE])
            if len(state.begin) < policy.size:
                state.begin.append(numbers)
            if len(state.recent) > policy.size:
                # While steps are slow, what was before them stays the measure.
                late = state.recent.popleft()
                if state.watch.open(step) is None:
                    state.past.append(late)
            while len(state.past) > policy.memory:
                state.past.popleft()
            if state.seen % _STRIDE == 0 and len(state.past) >= policy.before:
                self._judge(step, state)
        findings = [
            _finding(e, by_pushes=state.by_pushes) for e in state.watch.take(window.last_step)
        ]
        findings += [_recurring(e) for e in state.recurring.watch.take(window.last_step)]
        if not state.whole:
            # What is said of the step says where in it, too.
            findings += state.loading.findings(window)
        return Outcome({"throughput.dropped": self._check(state)}, tuple(findings))

    def _judge(self, step: int, state: DroppedState) -> None:
        state.judged += 1
        past, recent = state.past, np.array(state.recent)
        known = state.watch.open(step)
        if known is not None:
            before = np.array(state.begin if known.facts.creeps else past)
            if self._still_longer(recent, before):
                known.facts = _facts(before, recent, creeps=known.facts.creeps)
                state.watch.bad(step, known.facts)
            else:
                state.watch.good(step)
            return
        creeps = False
        if self._as_before(past, recent) or not self._longer(recent, np.array(past)):
            begin = state.begin
            creeps = (
                state.loading.watch.open(step) is None  # else that says where in the step, too
                and not self._as_before(begin, recent)
                and self._longer(recent, np.array(begin))
                and state.course.creeps()
            )
            if not creeps:
                state.watch.good(step)
                return
        before = np.array(state.begin if creeps else past)
        since = int(before[0, _STEP]) if creeps else _onset(before, recent)
        state.watch.bad(step, _facts(before, recent, creeps=creeps), first_step=since)
        state.whole = True

    def _longer(self, recent: Float64, before: Float64) -> bool:
        """Whether the last steps take longer than some before, beyond doubt."""
        policy = self.policy
        both = [_LENGTH, _ALONE]
        rise, excused = _rise(recent, before)
        shortest = np.quantile(recent[:, both], 0.1, axis=0) - excused
        longest = np.quantile(before[:, both], 0.9, axis=0)
        usual, now = np.median(before[:, _LENGTH]), np.median(recent[:, _LENGTH])
        return bool(
            rise > math.log(policy.factor)
            and float((shortest - longest).min()) > math.log(policy.apart)
            and math.exp(now) - math.exp(usual) > policy.least_seconds
        )

    def _still_longer(self, recent: Float64, before: Float64) -> bool:
        """Whether they are nearer to what they have become than to what they were."""
        return bool(_rise(recent, before)[0] > 0.5 * math.log(self.policy.factor))

    def _as_before(self, before: Collection[list[float]], recent: Float64) -> bool:
        """Whether a fifth of the steps before are longer than the shortest fifth of those now.

        So it is nearly always, and found in a few microseconds.
        """
        lengths: list[float] = sorted(recent[:, _ALONE].tolist())
        least = lengths[len(lengths) // 5] - math.log(self.policy.apart)
        longer = sum(numbers[_ALONE] > least for numbers in before)
        return longer > 0.2 * len(before)

    def _check(self, state: DroppedState) -> Check:
        if state.judged:
            return Check.ok(f"{count(state.seen, 'step')} took no longer than those before them.")
        least = self.policy.before + self.policy.size + self.policy.skipped
        if state.seen < least:
            why = f"{count(state.seen, 'step')} of {least} with their length."
        else:
            why = (
                f"Of {count(state.seen, 'step')} with their length {state.usable:,} of {least} "
                "can be judged: in the others ranks waited for a processor for most of the time, "
                "or another number of tensors was trained. The machine has too much to do."
            )
        return Check.insufficient(why)


def _numbers(window: Window) -> Float64:
    """Of each step that was timed what is remembered: float64 [N, 9]."""
    block = timed(window, _NAMES)
    queued = np.nan_to_num(block.series["queued_seconds"]).max(axis=1, initial=0.0)
    known = block.lengths > 0
    lengths = np.where(known, block.lengths, 1.0)
    # Threads that reduce wait for a processor as those do that compute, and only these are counted.
    # Of a step that is mostly waiting nothing can be said.
    known &= 2 * queued <= _MOST_QUEUED * lengths
    alone = np.where(known, lengths - 2 * queued, 1.0)
    # What is known of one of the ranks at the least is enough: batches of ranks are alike.
    samples, each, tokens = (_largest(block.series[name]) for name in _SIZES)
    size = np.where(np.isfinite(tokens), tokens, samples * np.where(np.isfinite(each), each, 1.0))
    columns = [
        block.steps.astype(np.float64),
        np.where(known, np.log(lengths), np.nan),
        np.where(known, np.log(alone), np.nan),
        np.log(np.where(size > 0, size, np.nan)),
        *(timed_median(window, name) for name in _PARTS),
        block.lengths,
        queued,
    ]
    rows: Float64 = np.stack(columns, axis=1)
    return rows


def _largest(rows: Float64) -> Float64:
    """Largest known value of each row, float64 [N] of [N, R]; NaN where there is none."""
    largest: Float64 = np.fmax.reduce(rows, axis=1, initial=np.nan)
    return largest


def _rise(recent: Float64, before: Float64) -> tuple[float, float]:
    """How much longer steps are than some before, as a logarithm, and what excuses as much more.

    What is given to the model may be more than before: longer sequences, larger batches.
    """
    usual, now = known_median(before), known_median(recent)
    given = now[_SIZE] - usual[_SIZE]
    excused = 2 * max(float(given), 0.0) if math.isfinite(given) else 0.0
    return float(min((now - usual)[[_LENGTH, _ALONE]])) - excused, excused


def _facts(before: Float64, recent: Float64, *, creeps: bool) -> Slowdown:
    usual, now = known_median(before), known_median(recent)
    return Slowdown(
        before=math.exp(usual[_LENGTH]),
        now=math.exp(now[_LENGTH]),
        parts=dict(zip(_PARTS, (now - usual)[_FIRST_PART:_SECONDS].tolist(), strict=True)),
        sized=math.isfinite(now[_SIZE] - usual[_SIZE]),
        creeps=creeps,
    )


def _onset(past: Float64, recent: Float64) -> int:
    """The first of the longer steps; up to as many before those that are judged, too."""
    rows = np.concatenate([past[-len(recent) :], recent])
    at, _, _ = change_point(rows[:, _ALONE])
    return int(rows[at, _STEP])


def _finding(episode: Episode[Slowdown], *, by_pushes: bool) -> Finding:
    facts, step = episode.facts, episode.first_step
    more = facts.now - facts.before
    parts = {name: grown for name, grown in facts.parts.items() if math.isfinite(grown)}
    # Where it is known what a rank waits for the others, that is no part of what it computes.
    if "wait_seconds" in parts and "compute_seconds" in parts:
        parts["compute_seconds"] -= parts["wait_seconds"]
    largest = max(parts, key=lambda name: parts[name], default="")
    where = ""
    if largest and parts[largest] > 0.5 * more:
        said = {
            "data_seconds": "before the first forward pass: the loader, the copy to the device, "
            "or other work of the loop between two steps",
            "compute_seconds": "in the forward and backward pass and what lies between them and "
            "the optimizer's step",
            "wait_seconds": "after a rank's last gradient: in the reduction, or in what the loop "
            "does between it and the optimizer's step",
        }
        where = f"Of the {duration(more)}, {duration(parts[largest])} are spent {said[largest]}."
    times = number(facts.now / facts.before)
    if facts.creeps:
        title = f"Steps take longer and longer: {times} times as long as the first ones"
        how = (
            f"The first steps took {duration(facts.before)}; it has grown in all parts of the run, "
            f"to {duration(facts.now)}."
        )
        remedy = (
            "Look for what grows in the loop: a list that is gone through, added up or copied at "
            "every step, results that keep their graph, hooks that are registered anew each time, "
            "a file that is read again from its start, a cache without an end."
        )
    else:
        title = f"A step takes {times} times as long as before, since step {step}"
        how = (
            f"A step took {duration(facts.before)} before step {step}, and takes "
            f"{duration(facts.now)}."
        )
        remedy = (
            f"Look for what the loop does from step {step} on and did not do before (a check, "
            "logging, saving, a profiler left running), at the loader (its workers, its cache, the "
            "file system), and at what the machines share with others: throttled devices, the "
            "network."
        )
    return episode.finding(
        kind="throughput.dropped",
        severity="info" if by_pushes else "warning",
        title=title,
        cause=sentences(how, "Its batch has not grown accordingly." if facts.sized else "", where),
        remedy=remedy,
        evidence={
            "step_seconds_before": facts.before,
            "step_seconds": facts.now,
            "times": facts.now / facts.before,
            "creeps": facts.creeps,
            **{f"more_{name}": grown for name, grown in parts.items()},
        },
    )


def _recurring(episode: Episode[LongSteps]) -> Finding:
    facts = episode.facts
    cause, remedy = cause_and_remedy(episode)
    return episode.finding(
        kind="throughput.dropped",
        key="period",
        severity=facts.severity,
        title=title(facts),
        cause=cause,
        remedy=remedy,
        evidence={
            "period": facts.period,
            "step_seconds": facts.long,
            "step_seconds_before": facts.usual,
            "times": facts.long / facts.usual,
            "lost_share": facts.lost,
            "since_start": facts.since_start,
        },
    )
