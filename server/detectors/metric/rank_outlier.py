"""Is one rank exchangeable with the others in one series? Pure.

Values are held against the median of the ranks at the same step, and taken together in blocks of
observations. What is usual for a rank, and how far ranks and blocks scatter around it, is taken
from the blocks before: exchangeable, no rank's block lies far outside of all of them, several times
in a row. Autocorrelation within a block does not matter then, and that between blocks is in the
scatter of means over as many blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from rankscope.server.detectors.mechanisms.equal_distances import beat, tail
from rankscope.server.detectors.mechanisms.statistics import change_point
from rankscope.server.detectors.metric.found import Event, MetricPolicy
from rankscope.server.window import Bool, Float64, Int64

Float32 = npt.NDArray[np.float32]

# Smallest scatter that is believed, as a share of the level (`statistics.Baseline`).
FLOOR = 0.02
# Observations in a block: the median of 16 is not moved by a few outliers among them.
BLOCK = 16
# Blocks before the first is judged (128 observations), and remembered (512).
LEAST, MEMORY = 8, 32
# Blocks of which single values are kept, in single precision: those of the longest move that is
# judged, and two before it, in which its onset is looked for.
_RECENT = 10
# Blocks after which a new level is what is usual.
_SETTLED = 64
# Single values that stand out are remembered over this many observations.
_EVENTS = 1024
# Blocks after which what is usual is found anew.
_ANEW = 4
# Median of the absolute values of normal noise -> its standard deviation.
_TO_SIGMA = 1.4826
# Times that one of two ranks has moved as far as the other, to be the suspect one
# (`rank.loss_outlier` gives its hint from there on).
_OWN_MOVE = 4.0
# Observations without outliers, after the first that are judged, from which on those that come
# again are new, and no habit of the series.
CALM = LEAST * BLOCK + 64


def _median(values: Float64, axis: int) -> Float64:
    """Median along an axis; of no NaN. Sorting so few is faster than numpy's median."""
    ordered = np.sort(values, axis=axis)
    count = values.shape[axis]
    low, high = ordered.take((count - 1) // 2, axis), ordered.take(count // 2, axis)
    middle: Float64 = 0.5 * (low + high)
    return middle


def _means(blocks: Float64, length: int) -> Float64:
    """Means of this many consecutive rows, at each place; float64 [N - length + 1, R]."""
    sums = np.cumsum(np.concatenate([np.zeros((1, blocks.shape[1])), blocks]), axis=0)
    means: Float64 = (sums[length:] - sums[:-length]) / length
    return means


@dataclass(slots=True)
class Peers:
    """Ranks beside each other in one series.

    Attributes:
        ranks: that are compared, int64 [R].
        usual: median by rank of the blocks remembered, relative to the median of the ranks.
        widest: furthest that any rank's block lay from what is usual for it.
        sigma: of single values around what is usual.
        highest: furthest single value so far that was no outlier.
        runs: consecutive blocks of each rank that lay further than `widest`; signed.
        waiting: blocks since the first rank did so.
        shift: what lasts at present.
        recent: steps, int64 [BLOCK], and distances from the median of the ranks, [BLOCK, R].
        flat: blocks so far, in all of which all ranks had the same; -1 from another one on.
    """

    ranks: Int64
    usual: Float64 = field(default_factory=lambda: np.empty(0))
    widest: float = np.inf
    sigma: float = np.inf
    highest: float = 0.0
    seen: int = 0
    runs: Int64 = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    medians: deque[Float64] = field(default_factory=lambda: deque(maxlen=MEMORY))
    waiting: list[Float64] = field(default_factory=list)
    levels: deque[Float64] = field(default_factory=lambda: deque(maxlen=MEMORY + _SETTLED))
    shift: Event | None = None
    flat: int = 0
    learned: int = 0
    recent: deque[tuple[Int64, Float32]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    spikes: deque[tuple[int, int, int, float]] = field(default_factory=deque)

    def block(
        self, steps: Int64, values: Float64, policy: MetricPolicy, *, clock: bool
    ) -> Iterator[Event]:
        """Judges the next block.

        Args:
            steps: int64 [BLOCK].
            values: float64 [BLOCK, R]; NaN where a rank is missing.
            clock: whether single values are not to be judged.
        """
        if self._same(steps, values):
            return
        whole = not np.isnan(values).any()
        middle = _median(values, 1) if whole else np.nanmedian(values, axis=1)
        deviations = values - middle[:, None]
        if whole:
            block = _median(deviations, 0)
        else:
            there = (~np.isnan(deviations)).any(axis=0)
            block = self.usual.copy() if len(self.usual) else np.zeros(deviations.shape[1])
            block[there] = np.nanmedian(deviations[:, there], axis=0)
        level = float(_median(np.abs(middle), 0))
        self.recent.append((steps, deviations.astype(np.float32)))
        if len(self.ranks) == 2:
            self.levels.append(np.nanmedian(values, axis=0))
        self.seen += len(steps)
        if not len(self.usual):
            self._learn(block, level)
            if len(self.usual):
                yield from self._from_the_start(level, policy)
            return
        if not clock:
            yield from self._single(steps, values, deviations, level, policy)
        away = block - self.usual
        beyond = np.where(np.abs(away) > self.widest, np.sign(away), 0).astype(np.int64)
        self.runs = np.where(beyond * self.runs > 0, self.runs + beyond, beyond)
        if not beyond.any():
            self.shift = None
            for passed in self.waiting:
                self.medians.append(passed)
            self.waiting = []
            self._learn(block, level)
            return
        self.waiting.append(block)
        yield from self._lasting(steps, level, policy)
        if len(self.waiting) >= _SETTLED:
            self.medians.clear()
            self.waiting, self.usual = [], np.empty(0)

    def _same(self, steps: Int64, values: Float64) -> bool:
        """Takes a block in which all ranks have the same, as in all before it.

        Most series are taken after a reduction, and there is nothing to compare in them.
        """
        if self.flat < 0 or not (values == values[:, :1]).all():
            self.flat = -1
            return False
        level = abs(float(_median(values[:, 0], 0)))
        zero = self.medians[-1] if self.medians else np.zeros(values.shape[1])
        self.flat += 1
        self.medians.append(zero)
        # One array for all of them: most series are so for good.
        nothing = self.recent[-1][1] if self.recent else np.zeros(values.shape, dtype=np.float32)
        self.recent.append((steps, nothing))
        self.seen += len(steps)
        self.waiting, self.shift = [], None
        if self.flat >= LEAST:
            self.usual, self.runs = zero, np.zeros(len(zero), dtype=np.int64)
            self.widest = self.sigma = FLOOR * level
            self.highest = max(self.highest, FLOOR * level)
        return True

    def _learn(self, block: Float64, level: float) -> None:
        self.medians.append(block)
        self.learned += 1
        if len(self.medians) < LEAST:
            return
        if len(self.usual) and self.learned % _ANEW:
            self.widest = max(self.widest, float(np.abs(block - self.usual).max()))
            return
        held = np.array(self.medians)
        self.usual = _median(held, 0)
        self.widest = max(float(np.abs(held - self.usual).max()), FLOOR * level)
        if not len(self.runs):
            self.runs = np.zeros(len(self.usual), dtype=np.int64)
        single = np.abs(np.concatenate([a for _, a in self.recent][-2:]) - self.usual)
        self.sigma = max(_TO_SIGMA * float(np.nanmedian(single)), FLOOR * level)
        if not self.highest:
            every = np.abs(np.concatenate([a for _, a in self.recent]) - self.usual)
            self.highest = max(float(np.nanmax(every)), FLOOR * level)

    def _lasting(self, steps: Int64, level: float, policy: MetricPolicy) -> Iterator[Event]:
        run = int(np.abs(self.runs).max())
        if run < policy.blocks:
            return
        if run > 2 * policy.lasting_blocks:
            # Judged by what it was when it came: what drifts gets further away with time.
            if self.shift is not None:
                self.shift = replace(self.shift, seen_step=int(steps[-1]))
                yield self.shift
            return
        held = np.array(self.medians)
        run = min(run, len(held) // 2)
        means = _means(held, run)
        # Not the distance from what is usual, but that of neighbours: it is the same for what
        # drifts, or scatters slowly, as for noise.
        moves = np.abs(means[run:] - means[:-run])
        size = np.abs(np.mean(np.array(self.waiting[-run:]), axis=0) - means[-1])
        sigma = max(_TO_SIGMA * float(np.median(moves)), FLOOR * level / policy.min_z)
        widest = max(float(moves.max()), FLOOR * level)
        # Of what drifts, all of n moves are C times as small as the next one by chance in C^-n.
        n = len(held) // run * (held.shape[1] - 1)
        certain = policy.drift_chance ** (-1 / n)
        out = (
            (np.abs(self.runs) >= run)
            & (size > policy.min_z * sigma)
            & (size > max(policy.min_times, certain**0.5) * widest)
        )
        if not out.any():
            if self.shift is not None:  # it is still there, and longer means are fewer
                self.shift = replace(self.shift, seen_step=int(steps[-1]))
                yield self.shift
            return
        # Of two ranks each is as far from the middle as the other; of more, half move together
        # where what they read changes, and none of them is an outlier.
        others = size[~out]
        few = len(size) == 2 or 2 * int(out.sum()) < len(size)
        if not few or (len(others) and size[out].min() < policy.min_others * others.max()):
            return
        top = int(np.argmax(size))
        spread = float(np.ptp(self.usual[~out])) if len(others) > 1 else 0.0
        extreme = (
            run >= policy.lasting_blocks
            and size[top] > policy.extreme_z * sigma
            and size[top] > max(policy.extreme_times, certain) * widest
            and size[top] > policy.min_spread * spread
            and (not len(others) or size[out].min() > 2 * policy.min_others * others.max())
        )
        move = float(np.mean(np.array(self.waiting[-run:])[:, top]) - means[-1, top])
        self.shift = Event(
            question="shift",
            ranks=tuple(int(r) for r in self.ranks[self._movers(out)]),
            first_step=self._onset(top),
            seen_step=int(steps[-1]),
            size=move,
            usual=level,
            times=float(size[top] / widest),
            extreme=bool(extreme),
        )
        yield self.shift

    def _movers(self, out: Bool) -> Bool:
        """Of two ranks the one that has moved itself, where the other has not."""
        if len(out) > 2:
            return out
        held = np.array(self.levels)
        since = len(self.waiting)
        moved = np.abs(held[-since:].mean(axis=0) - np.median(held[:-since], axis=0))
        if moved.max() < _OWN_MOVE * moved.min():
            return np.ones(2, dtype=bool)
        farther: Bool = moved == moved.max()
        return farther

    def _onset(self, column: int) -> int:
        kept = list(self.recent)[-(len(self.waiting) + 2) :]
        steps = np.concatenate([s for s, _ in kept])
        deviations = np.concatenate([a[:, column] for _, a in kept])
        there = ~np.isnan(deviations)
        at, _, _ = change_point(deviations[there])
        return int(steps[there][at])

    def _from_the_start(self, level: float, policy: MetricPolicy) -> Iterator[Event]:
        """One rank that is not like the others, which are alike, since the first block."""
        if len(self.ranks) < 4:
            return  # of three, two lie close together by chance
        size = np.abs(self.usual)
        order = np.argsort(size)
        top, second = int(order[-1]), float(size[order[-2]])
        held = np.array(self.medians)
        alike = np.sign(held[:, top]) == np.sign(self.usual[top])
        if not alike.all() or size[top] <= policy.start_times * max(second, self.widest):
            return
        if size[top] <= policy.start_level * level:
            return
        yield Event(
            question="shift",
            ranks=(int(self.ranks[top]),),
            first_step=int(self.recent[0][0][0]),
            seen_step=int(self.recent[-1][0][-1]),
            size=float(self.usual[top]),
            usual=level,
            times=float(size[top] / max(second, self.widest)),
            extreme=False,
            from_start=True,
        )

    def _single(
        self, steps: Int64, values: Float64, deviations: Float64, level: float, policy: MetricPolicy
    ) -> Iterator[Event]:
        """Single values that stand out, and whether they are always of one rank."""
        far = np.abs(deviations - self.usual)
        far[np.isnan(far)] = 0.0
        limit = policy.spike_z * self.sigma
        if float(far.max()) <= limit:
            self.highest = max(self.highest, float(far.max()))
            return
        if len(self.ranks) < 3:
            return  # which of two stands out, its own past says
        first = self.seen - len(steps)
        order = np.argsort(far, axis=1)
        rows = np.arange(len(far))
        top, second = far[rows, order[:, -1]], far[rows, order[:, -2]]
        alone = (top > limit) & (top > policy.min_others * second)
        ordinary = far[~alone]
        before = self.highest
        for index in np.flatnonzero(alone).tolist():
            column = int(order[index, -1])
            if self.runs[column]:
                continue  # it has moved, and each of its values lies far away
            self.spikes.append((first + index, int(steps[index]), column, float(top[index])))
            if top[index] > policy.single_times * before:
                yield self._spike(
                    index, column, steps, deviations, level, float(top[index]) / before
                )
        while self.spikes and self.spikes[0][0] <= self.seen - _EVENTS:
            self.spikes.popleft()
        if ordinary.size:
            self.highest = max(self.highest, float(ordinary.max()))
        yield from self._recurring(int(steps[-1]), level, policy)

    def _spike(
        self, index: int, column: int, steps: Int64, deviations: Float64, level: float, times: float
    ) -> Event:
        return Event(
            question="outlier",
            ranks=(int(self.ranks[column]),),
            first_step=int(steps[index]),
            seen_step=int(steps[-1]),
            size=float(deviations[index, column] - self.usual[column]),
            usual=level,
            times=times,
            extreme=False,
        )

    def _recurring(self, step: int, level: float, policy: MetricPolicy) -> Iterator[Event]:
        owners = np.bincount([c for _, _, c, _ in self.spikes], minlength=len(self.ranks))
        top = int(np.argmax(owners))
        own = [spike for spike in self.spikes if spike[2] == top]
        if len(own) < policy.recurring or self.spikes[-1][2] != top:
            return
        chance = tail(len(self.spikes), len(own), 1 / len(self.ranks))
        samples = np.array([at for at, _, _, _ in own])
        found = beat(samples, min(self.seen, _EVENTS), least=policy.recurring, shortest=2)
        regular = found is not None and found.chance < policy.chance
        if chance >= policy.chance and not regular:
            return
        size = float(np.median([size for _, _, _, size in own]))
        calm = own[0][0] >= CALM
        period = 0
        if found is not None and regular:
            at = {at_sample: s for at_sample, s, _, _ in own}
            first, last = found.samples[0], found.samples[-1]
            period = round(found.period * (at[last] - at[first]) / (last - first))
        yield Event(
            question="recurring",
            ranks=(int(self.ranks[top]),),
            first_step=own[0][1],
            seen_step=step,
            size=size,
            usual=level,
            times=size / self.sigma,
            extreme=calm and size > policy.extreme_times * self.highest,
            period=period,
            count=len(own),
        )
