"""A rank that takes longer than its peers at one sample after another: shared by slow ranks."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.mechanisms.incident import Incident
from rankscope.server.detectors.mechanisms.series_by_step import median
from rankscope.server.detectors.mechanisms.statistics import (
    Spacing,
    change_point,
    median_of_sorted,
    shared,
)
from rankscope.server.detectors.policy import Observations, Seconds, Share, Steps
from rankscope.server.detectors.rank.jitter import Jitter, Jittering, JitterPolicy
from rankscope.server.window import Float64, Int64, Window

# A rise of the step time by less does not date anything.
_LEAST_JUMP = math.log(1.2)
# Steps among which the rise is looked for, and more where the samples lie further apart.
_BACK = 64

# What reports ranks that had to wait for a processor, and for how long they had one.
QUEUEING = ("queued_seconds", "processor_seconds")


@dataclass(frozen=True, slots=True)
class LatenessPolicy(JitterPolicy):
    """When a rank is late.

    Attributes:
        least_seconds: smallest lateness. A process that has lost its core gets it back after some
            milliseconds, and where cores are shared the same one may come last step after step.
        least_share: the same as a share of the step.
        looks: number of most recent samples that are judged.
        share: share of these samples at which the rank was late, from which on it is reported.
        still: the same share, down to which a reported one goes on.
        steps: smallest number of steps over which the samples extend.
        calm: samples without it after which it is over.
        memory: number of step times remembered, to find the onset.
    """

    least_seconds: Seconds = 0.005
    least_share: Share = 0.2
    looks: Observations = 8
    share: Share = 0.9
    still: Share = 0.5
    steps: Steps = 20
    calm: Observations = 8
    memory: Steps = 2048


@dataclass(frozen=True, slots=True)
class TimingSample:
    """One step at which it is known what every rank took.

    Attributes:
        ranks: int64 [R], those of which it is.
        took: float64 [R], what they took, in seconds.
        late: ranks that took too long -> seconds more than half of the ranks.
        step_seconds: length of the step, median over the ranks.
    """

    step: int
    ranks: Int64
    took: Float64
    late: Mapping[int, float]
    step_seconds: float

    def seconds(self) -> dict[int, float]:
        """Rank -> what it took."""
        return dict(zip(self.ranks.tolist(), self.took.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Timed:
    """Steps of a window that were timed: N steps, R ranks; NaN where a rank posted nothing.

    Attributes:
        steps: int64 [N].
        series: name -> float64 [N, R], seconds.
        lengths: float64 [N], of the steps, median over the ranks.
        lengths_alone: the same without what each rank waited for a processor: so it dates what a
            rank does, and not when the machine got more to do.
        idle: float64 [N, R], seconds for which a rank neither ran nor waited for a processor. It
            waited for something else, for another rank perhaps: by more than that it was not kept
            waiting. Known of ranks that had to wait for a processor.
    """

    steps: Int64
    series: Mapping[str, Float64]
    lengths: Float64
    lengths_alone: Float64
    idle: Float64


@dataclass(slots=True, kw_only=True)
class Late(Incident):
    """Ranks that are late, while they are.

    Attributes:
        own: median seconds that they take.
        others: median seconds that the others take.
        step_seconds: median length of a step.
        before: median length of a step before it began; NaN where that is not known.
        samples: this many found it.
    """

    ranks: tuple[int, ...]
    own: float
    others: float
    step_seconds: float
    before: float
    samples: int = 0

    @property
    def lost(self) -> float:
        """Share of the step that goes into waiting for them."""
        return min((self.own - self.others) / self.step_seconds, 1.0)

    def evidence(self) -> dict[str, float]:
        """What the findings of all kinds have in common."""
        known = {"step_seconds_before": self.before} if math.isfinite(self.before) else {}
        return {
            "step_seconds": self.step_seconds,
            **known,
            "lost_share": self.lost,
            "looks": self.samples,
        }


@dataclass(slots=True)
class StepTimes:
    """Lengths of the steps, to date what a sample found later.

    Args:
        size: number remembered.
    """

    size: int
    steps: deque[int] = field(init=False)
    seconds: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self.steps = deque(maxlen=self.size)
        self.seconds = deque(maxlen=self.size)

    def push(self, step: int, seconds: float) -> None:
        """Takes the next step's length."""
        if seconds > 0 and math.isfinite(seconds):
            self.steps.append(step)
            self.seconds.append(seconds)

    def rise(self, after: int, until: int) -> int | None:
        """The step after `after` from which on they took longer, up to `until`; None for none."""
        inside = [
            (step, seconds)
            for step, seconds in zip(self.steps, self.seconds, strict=True)
            if after < step <= until
        ]
        if len(inside) < 2:
            return None
        at, low, high = change_point(np.log([seconds for _, seconds in inside]))
        return inside[at][0] if high - low > _LEAST_JUMP else None

    def usual(self, before: int) -> float:
        """Median length of the last 100 steps before a step; NaN for fewer than 5."""
        earlier = [
            seconds for step, seconds in zip(self.steps, self.seconds, strict=True) if step < before
        ][-100:]
        return median(earlier) if len(earlier) >= 5 else math.nan


class Lateness:
    """Follows who is late, sample by sample.

    Args:
        policy: thresholds.
    """

    def __init__(self, policy: LatenessPolicy) -> None:
        self.policy = policy
        self.judged = 0
        self.times = StepTimes(policy.memory)
        self.spacing = Spacing()
        self.current: Late | None = None
        self.jitter = Jitter(policy)
        # Enough that `steps` of them, one a step, are there.
        self._samples: deque[TimingSample] = deque(maxlen=max(policy.looks, policy.steps) + 1)
        self._previous = -1
        self._ended: list[Late] = []

    def late(
        self,
        ranks: Int64,
        seconds: Float64,
        lengths: Float64,
        idle: Float64,
        excused: Float64 | float = 0.0,
    ) -> list[Mapping[int, float]]:
        """At each of N steps those that take longer than half of the ranks do, and how much.

        They are late where these wait for them. Of an even number it is the faster one of the two
        in the middle: of two ranks the slower one is late.

        Args:
            ranks: int64 [R].
            seconds: float64 [N, R], what they took; NaN for ranks that are not to be compared.
            lengths: float64 [N], of the steps.
            idle: float64 [N, R], for how long ranks waited for anything but a processor; those of
                which it is not known may have waited all the time.
            excused: float64 [N], for how long a rank may have waited within what it took.
        """
        counts = np.isfinite(seconds).sum(axis=1)
        usual = np.sort(seconds, axis=1)[np.arange(len(seconds)), np.maximum(counts - 1, 0) // 2]
        least = np.maximum(self.policy.least_seconds, self.policy.least_share * lengths)
        with np.errstate(invalid="ignore"):
            over = seconds - usual[:, None] > (least + excused)[:, None]
        over[counts < 2] = False
        found: list[Mapping[int, float]] = [{}] * len(seconds)
        for n in np.flatnonzero(over.any(axis=1)).tolist():
            if np.isfinite(idle[n]).any():
                waiting = np.isfinite(seconds[n]) & ~over[n]
                waited = np.sort(np.where(np.isfinite(idle[n]), idle[n], np.inf)[waiting])
                if not waited[len(waited) // 2] > least[n]:
                    continue
            behind = seconds[n, over[n]] - usual[n]
            found[n] = dict(zip(ranks[over[n]].tolist(), behind.tolist(), strict=True))
        return found

    def observe(self, sample: TimingSample) -> None:
        """Takes the next sample."""
        policy = self.policy
        self.judged += 1
        self.spacing.push(sample.step)
        current = self.current
        if current is not None and current.over(sample.step):
            self._ended.append(current)
            self.current = current = None
        self._samples.append(sample)
        who = self._persistent()
        if not who:
            self.jitter.observe(sample.step, sample.step_seconds, sample.late, len(sample.ranks))
            return
        self.jitter.forget()
        recent = [known for known in self._within() if known.late.keys() & who]
        if current is None:
            first = recent[0]
            before = max((k.step for k in self._samples if k.step < first.step), default=-1)
            # Where it is late by little, the first samples need not have found it.
            since = min(before, sample.step - _BACK)
            rise = self.times.rise(since, sample.step)
            onset = first.step if rise is None else rise
            self.current = current = Late(
                first_step=onset,
                seen_step=sample.step,
                last_step=sample.step,
                clear_after=0,
                ranks=(),
                own=0.0,
                others=0.0,
                step_seconds=0.0,
                before=self.times.usual(onset),
            )
        current.last_step = sample.step
        current.clear_after = max(self.spacing.steps(policy.calm), policy.steps)
        current.ranks = tuple(sorted(who))
        current.own = median(
            [known.seconds()[r] for known in recent for r in sorted(known.late.keys() & who)]
        )
        current.others = median(
            [took for known in recent for r, took in known.seconds().items() if r not in who]
        )
        current.step_seconds = median([known.step_seconds for known in recent])
        current.samples += 1

    def take(self) -> Iterator[Late]:
        """What is to be reported after a window: what ended in it, and what has not."""
        yield from self._ended
        self._ended = []
        if self.current is not None:
            yield self.current

    def now_and_then(self) -> Iterator[Jittering]:
        """The same of ranks that are late again and again, and in time in between."""
        return self.jitter.take()

    def _within(self) -> list[TimingSample]:
        """The samples that count: the last `looks`; those of the last `steps` if these are more."""
        policy = self.policy
        last = self._samples[-1].step
        inside = [sample for sample in self._samples if sample.step > last - policy.steps]
        return inside if len(inside) > policy.looks else list(self._samples)[-policy.looks :]

    def _persistent(self) -> frozenset[int]:
        """Ranks that were late at nearly all of them."""
        policy = self.policy
        samples = self._within()
        if len(samples) < policy.looks or samples[-1].step - samples[0].step < policy.steps - 1:
            return frozenset()
        share = policy.share if self.current is None else policy.still
        needed = math.floor(share * len(samples))
        times = Counter(rank for sample in samples for rank in sample.late)
        often = [rank for rank, count in times.items() if count >= needed]
        return frozenset(samples[-1].ranks.tolist()).intersection(often) if often else frozenset()


def rows_of_hosts(window: Window) -> tuple[Int64, ...]:
    """For each machine the rows of its ranks, as far as these have reported where they run."""
    hosts: dict[str, list[int]] = defaultdict(list)
    for row, life in enumerate(window.liveness):
        if life.host:
            hosts[life.host].append(row)
    return tuple(np.array(rows, np.int64) for rows in hosts.values())


def without_queueing(hosts: Sequence[Int64], seconds: Float64, queued: Float64) -> Float64:
    """What ranks took, without the bad luck that one of them had on a machine of several.

    Where a machine has more to do than it can, a rank loses its processor and the others wait for
    it, for dozens of steps maybe the same one. Which one that is, is chance; what all ranks of a
    machine wait for is not, and stays: the machine is slow. So does all that a rank waits for that
    is alone on its machine.

    Args:
        hosts: rows of each machine's ranks.
        seconds: float64 [N, R], that ranks took at N steps.
        queued: float64 [N, R], for which they were ready and had no processor; NaN for (nearly)
            none.

    Returns:
        float64 [N, R].
    """
    some = np.isfinite(queued).any(axis=1)
    if not some.any():
        return seconds
    waited = np.nan_to_num(queued[some])
    usual = waited.copy()
    for rows in hosts:
        usual[:, rows] = np.sort(waited[:, rows], axis=1)[:, [(len(rows) - 1) // 2]]
    fair = seconds.copy()
    fair[some] -= np.minimum(np.maximum(waited - usual, 0.0), seconds[some])
    return fair


def medians(rows: Float64) -> Float64:
    """Median of the finite values of each row, float64 [N] of [N, R]; NaN where there is none."""
    reported = np.isfinite(rows)
    counts = reported.sum(axis=1)
    ordered = np.sort(np.where(reported, rows, np.nan), axis=1)
    if not rows.shape[1]:
        return np.full(len(rows), np.nan)
    return median_of_sorted(ordered, np.maximum(counts, 1))


def timed(window: Window, names: Sequence[str]) -> Timed:
    """Steps at which any rank posted `step_seconds`, with some series there.

    Read-only: the detectors of times share what is computed of a window.

    Args:
        names: the series.
    """
    series = {name: _timed_series(window, name) for name in names}
    return Timed(
        steps=window.steps[_timed_columns(window)],
        series=series,
        lengths=timed_median(window, "step_seconds"),
        lengths_alone=_lengths_alone(window),
        idle=_idle(window),
    )


def timed_median(window: Window, name: str) -> Float64:
    """Median of a series over the ranks at the steps that were timed, float64 [N]."""
    return _kept(window, "timed median", name, lambda: medians(_timed_series(window, name)))


def _timed_columns(window: Window) -> Int64:
    leading = window.series.get("step_seconds")
    return np.flatnonzero(leading.present.any(axis=0)) if leading else np.empty(0, np.int64)


def _timed_series(window: Window, name: str) -> Float64:
    """Float64 [N, R]; NaN where a rank posted nothing."""

    def made() -> Float64:
        columns, reported = _timed_columns(window), window.series.get(name)
        if reported is None:
            return np.full((len(columns), len(window.ranks)), np.nan)
        present, values = reported.present[:, columns], reported.values[:, columns]
        return np.ascontiguousarray(np.where(present, values, np.nan).T)

    return _kept(window, "timed", name, made)


def _lengths_alone(window: Window) -> Float64:
    def made() -> Float64:
        seconds, queued = (_timed_series(window, n) for n in ("step_seconds", QUEUEING[0]))
        return medians(np.maximum(seconds - np.nan_to_num(queued), 0.0))

    return _kept(window, "timed", "alone", made)


def _idle(window: Window) -> Float64:
    def made() -> Float64:
        seconds, queued, ran = (_timed_series(window, n) for n in ("step_seconds", *QUEUEING))
        return seconds - ran - queued

    return _kept(window, "timed", "idle", made)


def _kept(window: Window, what: str, name: str, made: Callable[[], Float64]) -> Float64:
    known = window.derived.get((what, name))
    if known is None:
        known = shared(window, what, name, (made(),))
    array: Float64 = known[0]
    return array
