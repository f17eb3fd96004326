"""Single batches whose inputs are far larger or smaller than usual, on one rank or on all. Pure.

No comparison of ranks shows what all of them read alike, and a normalisation hides it from loss and
gradient: each rank's own past is its control.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.data.received import Received
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.statistics import rank_rows, robust_sigma
from rankscope.server.detectors.mechanisms.wording import count, listing, number, ranks, sentences
from rankscope.server.window import Window

# Observations that say what is usual, at least and at most.
_LEAST, _BACK = 16, 64
# A forgotten or doubled normalisation is a factor of 2 or more; batches of a few samples of
# heavy-tailed data come to 2 or 3 by chance.
_FACTOR = 5.0
# Standard deviations, and multiples of the furthest among the last ones: tails that fall with the
# third power of the size have one of 27 such values beyond three times the furthest of 64.
_SIGMAS, _FURTHEST = 10.0, 3.0
# Sampled elements scatter by so much at least.
_FLOOR = 0.02
# Observations after it, and how many of them may be so too: what stays are other data.
_AFTER, _STILL = 4, 1
# From this many on they are no accident.
_RECURS = 3
# Times the usual size, or its inverse, from which on a single one is no accident of the data, and
# how far beyond what makes one odd it has to lie. Batches of nothing but zeros are padding.
_FAR, _FAR_LIMITS = 1000.0, 3.0
# How many of the last ones are listed as evidence, and of the first ones in the title.
_LISTED, _NAMED = 64, 3
# Stands for a batch of zeros.
_NOTHING = 1e-30


@dataclass(frozen=True, slots=True)
class OddInput:
    """One batch: its step, its rank, and how many times as large as usual its inputs are.

    Attributes:
        far: no data scatter so, and these least of all.
    """

    step: int
    rank: int
    factor: float
    far: bool = False


@dataclass(slots=True)
class OddBatches:
    """What was seen.

    Attributes:
        last: the last ones, in the order in which they were found.
        first: the first steps that had any.
        count: number of steps that had any.
        ranks: that had any.
    """

    last: tuple[OddInput, ...] = ()
    first: tuple[int, ...] = ()
    count: int = 0
    ranks: frozenset[int] = frozenset()

    @property
    def steps(self) -> list[int]:
        """Of the last ones."""
        return sorted({one.step for one in self.last})

    def add(self, odd: OddInput) -> None:
        """Takes one."""
        if all(one.step != odd.step for one in self.last):
            self.count += 1
            self.first = tuple(sorted((*self.first, odd.step)))[:_NAMED]
        self.last = (*self.last, odd)[-_LISTED:]
        self.ranks |= {odd.rank}

    def far(self) -> bool:
        """Whether one was."""
        return any(odd.far for odd in self.last)

    def longest_gap(self) -> int:
        """Steps from one to the next; 0 for fewer than two."""
        return max(np.diff(self.steps).tolist(), default=0)

    def period(self) -> int:
        """The same where these are equal, of some; else 0."""
        gaps = set(np.diff(self.steps).tolist())
        return gaps.pop() if self.count >= _RECURS and len(gaps) == 1 else 0


@dataclass(slots=True)
class _Past:
    """One rank's inputs, as logarithms: the usual ones, and an odd one with what came after."""

    values: deque[float] = field(default_factory=lambda: deque(maxlen=_BACK))
    waiting: list[tuple[int, float]] = field(default_factory=list)

    def take(self, step: int, value: float) -> tuple[int, float, bool] | None:
        """The next observation; step and deviation of an odd one that has passed by, and `far`."""
        if len(self.values) < _LEAST:
            self.values.append(value)
            return None
        deviation, limit = self._deviation(value)
        if not self.waiting and abs(deviation) <= limit:
            self.values.append(value)
            return None
        self.waiting.append((step, value))
        if len(self.waiting) <= _AFTER:
            return None
        judged = [(at, *self._deviation(one)) for at, one in self.waiting]
        still = sum(abs(far) > most for _, far, most in judged[1:])
        after = [one for _, one in self.waiting[1:]]
        self.waiting.clear()
        # Where more are so, they are what is usual from now on.
        self.values.extend(after)
        at, deviation, limit = judged[0]
        far = max(math.log(_FAR), _FAR_LIMITS * limit) < abs(deviation) < -0.5 * math.log(_NOTHING)
        return (at, deviation, far) if still <= _STILL else None

    def _deviation(self, value: float) -> tuple[float, float]:
        past = np.array(self.values)
        middle = float(np.median(past))
        sigma = max(robust_sigma(past), _FLOOR)
        furthest = float(np.abs(past - middle).max())
        return value - middle, max(math.log(_FACTOR), _SIGMAS * sigma, _FURTHEST * furthest)


@dataclass(slots=True)
class OddInputs:
    """Follows the inputs of every rank.

    Attributes:
        judged: inputs so far that were held against those before.
    """

    judged: int = 0
    watch: Watch[OddBatches] = field(default_factory=lambda: Watch(clear_after=64))
    _past: dict[int, _Past] = field(default_factory=dict)

    def take(self, window: Window, series: str, received: Received) -> Iterator[Finding]:
        """Goes through a window; what was found.

        Args:
            received: ranks that read no data.
        """
        steps, rows = rank_rows(window, series)
        members = window.ranks.tolist()
        for step, row in zip(steps.tolist(), rows.tolist(), strict=True):
            for rank, value in zip(members, row, strict=True):
                if math.isfinite(value) and step < received.since.get(rank, step + 1):
                    past = self._past.setdefault(rank, _Past())
                    self.judged += len(past.values) >= _LEAST
                    odd = past.take(step, math.log(max(value, _NOTHING)))
                    if odd is not None:
                        self._report(OddInput(odd[0], rank, math.exp(odd[1]), odd[2]), step)
        for episode in self.watch.take(window.last_step):
            yield _finding(episode, len(members))

    def _report(self, odd: OddInput, step: int) -> None:
        episode = self.watch.open(step)
        facts = OddBatches() if episode is None else episode.facts
        facts.add(odd)
        episode = self.watch.bad(step, facts, first_step=odd.step)
        episode.clear_after = max(episode.clear_after, 3 * facts.longest_gap())
        # It is a single batch, and over with it.
        self.watch.good(step)


def _title(episode: Episode[OddBatches]) -> str:
    facts = episode.facts
    factor = float(np.exp(np.median(np.log([one.factor for one in facts.last]))))
    size = "large" if factor > 1 else "small"
    times = number(factor if factor > 1 else 1 / factor) if 1e-6 < factor < 1e6 else "millions of"
    if facts.count == 1:
        return f"The inputs at step {facts.first[0]} are {times} times as {size} as usual"
    more = facts.count - len(facts.first)
    named = [str(step) for step in facts.first]
    listed = f"{', '.join(named)} and {more:,} more" if more else listing(named)
    return (
        f"The inputs of {count(facts.count, 'single step')} are {times} times as {size} as usual: "
        f"{listed}"
    )


def _finding(episode: Episode[OddBatches], world: int) -> Finding:
    facts = episode.facts
    who, period = tuple(sorted(facts.ranks)), facts.period()
    return episode.finding(
        kind="data.outlier",
        key="odd-inputs",
        severity="warning" if facts.count >= _RECURS or facts.far() else "info",
        title=_title(episode),
        ranks=() if len(who) == world else who,
        stage="batch",
        cause=sentences(
            "The root mean square of these batches is nothing like that of the batches before and "
            f"after them, on {'every rank' if len(who) == world else ranks(who)}: they are not "
            "normalised, or hold broken values.",
            f"They come every {count(period, 'step')}." if period else "",
            "Layers that normalise hide this from the loss; running statistics of batch norm, and "
            "so evaluations and what is saved, suffer from it.",
        ),
        remedy=(
            f"Print mean and standard deviation of the batch of step {facts.steps[-1]} and of the "
            "step before it, and compare which files, sources or transforms they come from. "
            "Nothing, if a source whose inputs have other units takes its turn there."
        ),
        evidence={
            "steps": facts.steps,
            "factors": [one.factor for one in facts.last],
            "period": period,
        },
    )
