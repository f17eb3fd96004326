"""Ranks that hardly ever have a step in common, beside each other. Pure.

Workers of an asynchronous parameter server take versions in turn: each step is one worker's. What
they report is compared round by round: as soon as each has reported something new, the mean of what
it has is its value, at the step of the last.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.mechanisms.statistics import mean_over_ranks, rank_rows
from rankscope.server.window import Float64, Int64, Window

# Steps of single ranks before they are taken for turns, and of each that several have in common: a
# rank that alone logs at some steps, or reports a few late, takes none.
_LEAST, _EACH = 32, 4
# Values of one rank that a round waits for another's: workers that are ten times as slow as others
# still take part.
_PATIENCE = 16
# Rounds that wait for it.
_HELD = 64


@dataclass(slots=True)
class Turns:
    """One series of ranks that may take turns.

    Attributes:
        alone, common: steps so far that were one rank's, and several ranks'.
        waiting: rank -> sum and number of its values since the last round.
        known: ranks that have reported any.
        rounds: step, and rank -> mean, of those that were not given out yet.
        last: step that was given out last.
        turning: whether `means` has begun to give out rounds; it goes on so.
    """

    alone: int = 0
    common: int = 0
    waiting: dict[int, tuple[float, int]] = field(default_factory=dict)
    known: set[int] = field(default_factory=set)
    rounds: list[tuple[int, dict[int, float]]] = field(default_factory=list)
    last: int = -1
    turning: bool = False

    @property
    def taken(self) -> bool:
        """Whether ranks take turns, as far as is known."""
        return len(self.known) > 1 and self.alone > max(_LEAST, _EACH * self.common)

    def rows(self, window: Window, metric: str) -> tuple[Int64, Float64, Int64]:
        """What can be compared: steps that ranks have in common, and rounds of those that have not.

        Returns:
            Steps, int64 [N], each rank's value, float64 [N, R], NaN for none, and how many have
            one, finite or not, int64 [N].
        """
        steps, rows = rank_rows(window, metric)
        if not len(steps):
            return steps, rows, steps
        present = window.series[metric].present
        posted = present[:, present.any(axis=0)].T
        counts = posted.sum(axis=1)
        if not self.alone and (counts > 1).all():
            self.common += len(steps)
            self.last = int(steps[-1])
            return steps, rows, counts
        found: list[tuple[int, Float64, int]] = []
        for step, row, there in zip(steps.tolist(), rows, posted, strict=True):
            if there.sum() > 1:
                self.common += 1
                found.append((step, row, int(there.sum())))
                self.last = step
                continue
            self._alone(step, int(window.ranks[there][0]), float(row[there][0]))
            if not self.taken:
                continue
            for at, means in self.rounds:
                if at > self.last:
                    made = np.full(len(window.ranks), np.nan)
                    made[np.searchsorted(window.ranks, list(means))] = list(means.values())
                    found.append((at, made, len(means)))
                    self.last = at
            self.rounds.clear()
        if not found:
            return steps[:0], rows[:0], counts[:0]
        at_steps, values, numbers = zip(*found, strict=True)
        return np.array(at_steps, np.int64), np.stack(values), np.array(numbers, np.int64)

    def means(self, window: Window, metric: str) -> tuple[Int64, Float64]:
        """Steps, int64 [N], and the means over the ranks there, float64 [N]; rounds for turns.

        Workers that alternate, each at its own level, would be a mean that jumps to and fro. Not
        finite where a value of a rank is not.
        """
        steps, means = mean_over_ranks(window, metric)
        if len(window.ranks) < 2 or not len(steps):
            return steps, means
        present = window.series[metric].present
        posted = present[:, present.any(axis=0)]
        counts = posted.sum(axis=0)
        if not self.alone and (counts > 1).all():
            self.common += len(steps)
            return steps, means
        found: list[tuple[int, float]] = []
        for step, mean, row, number in zip(
            steps.tolist(), means.tolist(), posted.argmax(axis=0).tolist(), counts, strict=True
        ):
            if number > 1:
                self.common += 1
                found.append((step, mean))
                continue
            self._alone(step, int(window.ranks[row]), mean)
            self.turning |= self.taken
            if not self.turning:
                found.append((step, mean))
            elif self.rounds:
                values = list(self.rounds[-1][1].values())
                found.append((step, sum(values) / len(values)))
            self.rounds.clear()
        at_steps, values_there = zip(*found, strict=True) if found else ((), ())
        return np.array(at_steps, np.int64), np.array(values_there, np.float64)

    def _alone(self, step: int, rank: int, value: float) -> None:
        total, count = self.waiting.get(rank, (0.0, 0))
        self.waiting[rank] = total + value, count + 1
        self.known.add(rank)
        self.alone += 1
        if count + 1 >= _PATIENCE:
            self.known = set(self.waiting)  # who has said nothing meanwhile has left
        enough = self.turning or len(self.known) > 1
        if enough and self.waiting.keys() == self.known:
            self.rounds.append((step, {r: t / n for r, (t, n) in self.waiting.items()}))
            self.waiting.clear()
            del self.rounds[:-_HELD]
