"""Is one series, over all ranks, what its own past lets expect? Pure.

Asked of what a user logs. Only series that are noisy can answer: a schedule, a counter or a switch
scatters by nothing, and each of its steps would be infinitely far from the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.mechanisms.recurrence import Folds, detrended, folded
from rankscope.server.detectors.mechanisms.statistics import change_point, robust_sigma
from rankscope.server.detectors.metric.found import Event, MetricPolicy
from rankscope.server.detectors.metric.rank_outlier import BLOCK, CALM, FLOOR, LEAST, MEMORY
from rankscope.server.window import Float64, Int64

# Turning points of noise are two thirds of all its values, of a smoothed one a third to a half
# (Bienayme 1874); of what was set by rule next to none.
_NOISY = 0.2
# A new level is reported by this many blocks, each out of the range of all before.
_LEVEL = 3
# Of a period's places, this many at most hold the spike.
_TOOTH = 0.25


@dataclass(slots=True)
class Past:
    """One series over time: the median of the ranks at each step.

    Attributes:
        ranks: whose it is, where it is not that of all.
        highest: furthest that a value lay from the median of the values before it.
        recurring: spikes at equal distances, while they come.
        quiet: windows since the last one that had them.
        calm: whether there had been none for long before they came.
    """

    ranks: tuple[int, ...] = ()
    values: deque[float] = field(default_factory=lambda: deque(maxlen=LEAST * BLOCK))
    medians: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORY))
    waiting: list[float] = field(default_factory=list)
    folds: Folds = field(default_factory=Folds)
    highest: float = 0.0
    seen: int = 0
    recurring: Event | None = None
    quiet: int = 0
    calm: bool = False

    def block(self, steps: Int64, values: Float64, policy: MetricPolicy) -> Iterator[Event]:
        """Judges the next block: steps, int64 [BLOCK]; values, float64 [BLOCK]."""
        before = np.array(self.values)
        self.values.extend(values.tolist())
        self.seen += len(steps)
        due: set[int] = set()
        for step, value in zip(steps.tolist(), values.tolist(), strict=True):
            due.update(self.folds.push(step, value))
        if len(before) < LEAST * BLOCK or not _noisy(before):
            self.medians.append(float(np.median(values)))
            return
        for size in sorted(due):
            yield from self._periodic(size, policy)
        yield from self._single(steps, values, before, policy)
        yield from self._shifted(steps, values, policy)

    def _single(
        self, steps: Int64, values: Float64, before: Float64, policy: MetricPolicy
    ) -> Iterator[Event]:
        middle = float(np.median(before))
        floor = FLOOR * abs(middle)
        if not self.highest:
            self.highest = max(float(np.abs(before - middle).max()), floor)
        far = np.abs(values - middle)
        places = np.flatnonzero(far > policy.single_times * self.highest)
        ordinary = np.delete(far, places)
        # Several in a block are a level, or come again, and that is asked for elsewhere.
        if len(places) == 1:
            at = int(places[0])
            yield Event(
                question="spike",
                ranks=self.ranks,
                first_step=int(steps[at]),
                seen_step=int(steps[-1]),
                size=float(values[at] - middle),
                usual=middle,
                times=float(far[at] / self.highest),
                extreme=False,
            )
        if len(ordinary):
            self.highest = max(self.highest, float(ordinary.max()))

    def _shifted(self, steps: Int64, latest: Float64, policy: MetricPolicy) -> Iterator[Event]:
        block = float(np.median(latest))
        held = np.array(self.medians)
        self.waiting.append(block)
        del self.waiting[:-_LEVEL]
        past = held[: len(held) - (len(self.waiting) - 1)]
        self.medians.append(block)
        if len(past) < LEAST or len(self.waiting) < _LEVEL:
            return
        low, high = float(past.min()), float(past.max())
        new = self.waiting
        # What has a trend goes on as it did.
        margin = max(
            policy.extreme_times * (high - low),
            policy.min_z * robust_sigma(np.diff(past)),
            FLOOR * max(abs(low), abs(high)),
        )
        if not (min(new) > high + margin or max(new) < low - margin):
            return
        middle = float(np.median(past))
        size = float(np.median(new)) - middle
        around, values = self.folds.window((_LEVEL + 1) * BLOCK)
        yield Event(
            question="level",
            ranks=self.ranks,
            first_step=around[change_point(values)[0]],
            seen_step=int(steps[-1]),
            size=size,
            usual=middle,
            times=abs(size) / max(high - low, FLOOR * abs(middle)),
            extreme=False,
        )
        # The new level is what is usual from now on.
        self.medians.clear()
        self.values.clear()
        self.waiting.clear()
        self.highest = 0.0

    def _periodic(self, size: int, policy: MetricPolicy) -> Iterator[Event]:
        steps, values = self.folds.window(size)
        residual = detrended(size) @ values
        found = folded(residual)
        event = None
        if found is not None:
            profile = found.profile - np.median(found.profile)
            height = float(np.abs(profile).max())
            teeth = np.abs(profile) > 0.5 * height
            at = np.flatnonzero(teeth[np.arange(size) % found.length])
            rest = np.delete(residual, at)
            least = FLOOR * abs(float(np.median(values)))
            sigma = max(robust_sigma(rest), least) if len(rest) else least
            # The window may be older than they are.
            at = at[np.abs(residual[at]) > 0.5 * height]
            few = teeth.mean() <= max(_TOOTH, 1 / found.length)
            regular = len(at) >= policy.recurring and few and found.length > 2
            if regular and len(rest) and height > policy.spike_z * sigma:
                event = self._teeth(steps, values, at, height / sigma, height, policy)
        if event is not None:
            self.recurring, self.quiet = event, 0
            yield event
        elif self.recurring is not None and size == min(self.folds.sizes):
            self.quiet += 1
            if self.quiet > 4:
                self.recurring = None

    def _teeth(
        self,
        steps: list[int],
        values: Float64,
        at: Int64,
        sigmas: float,
        height: float,
        policy: MetricPolicy,
    ) -> Event:
        here = np.array(steps)[at]
        known = self.recurring
        if known is None:
            self.calm = self.seen - len(steps) + int(at[0]) >= CALM
        more = len(at) if known is None else int((here > known.seen_step).sum())
        return Event(
            question="spikes",
            ranks=self.ranks,
            first_step=int(here[0]) if known is None else known.first_step,
            seen_step=steps[-1],
            size=height,
            usual=float(np.median(values)),
            times=sigmas,
            extreme=self.calm and sigmas > policy.extreme_z,
            period=int(np.median(np.diff(here))),
            count=more + (0 if known is None else known.count),
        )


def _noisy(values: Float64) -> bool:
    """Whether a series has scatter of its own."""
    moves = np.diff(values)
    turns = moves[1:] * moves[:-1] < 0
    return bool(turns.mean() > _NOISY)
