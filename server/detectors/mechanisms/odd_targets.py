"""Batches whose targets lie far from all others, as data with heavy tails have them. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.mechanisms.series_by_step import median
from rankscope.server.detectors.mechanisms.statistics import mean_over_ranks
from rankscope.server.window import Window

# What a batch's targets scatter by: of a squared error, what their mean would lose.
SERIES = "target_deviance"
# Values before a step that show what is usual.
_USUAL = 64
# Share of a jump of the loss that the targets' own scatter has to rise by. An answer that knows
# nothing of an outlier loses by it what the mean of the targets does.
_SHARE = 0.5
# Probability of having waited so long for the first of them, below which they began later than the
# training, and are no property of its data.
_CHANCE = 0.01
# Values that are kept; a number each.
_MEMORY = 65_536


@dataclass(slots=True)
class OddTargets:
    """What the scatter of the targets says of jumps of the loss, and of the gradient."""

    _steps: list[int] = field(default_factory=list)
    _values: list[float] = field(default_factory=list)

    def take(self, window: Window) -> None:
        """Takes a window's values."""
        steps, means = mean_over_ranks(window, SERIES)
        for step, value in zip(steps.tolist(), means.tolist(), strict=True):
            if math.isfinite(value) and len(self._steps) < _MEMORY:
                self._steps.append(step)
                self._values.append(value)

    def explain(self, step: int, rise: float) -> bool | None:
        """Whether the targets of a step explain that its loss rose by so much.

        Returns:
            None where nothing is known of them.
        """
        place = self._place(step)
        if place is None or place < _USUAL // 4:
            return None
        before = self._values[max(place - _USUAL, 0) : place]
        return self._values[place] - median(before) >= _SHARE * rise

    def odd(self, step: int) -> bool | None:
        """Whether the targets of a step scatter more than nine tenths of those before.

        Returns:
            None where nothing is known of them.
        """
        place = self._place(step)
        if place is None or place < _USUAL // 4:
            return None
        before = sorted(self._values[max(place - _USUAL, 0) : place])
        return self._values[place] > before[math.ceil(0.9 * len(before)) - 1]

    def explained(self, values: Iterable[tuple[int, float]]) -> float:
        """Share of the variance of some steps' values that the targets' scatter explains.

        Args:
            values: steps, and the logarithm of something; linear in that of the scatter.
        """
        places = [(self._place(step), value) for step, value in values]
        known = [(self._values[p], v) for p, v in places if p is not None and self._values[p] > 0]
        if len(known) < _USUAL // 2:
            return 0.0
        scatter, value = np.array(known).T
        scatter = np.log(scatter)
        if not (scatter.std() > 0 and value.std() > 0):
            return 0.0
        return float(np.corrcoef(scatter, value)[0, 1]) ** 2

    def of_data(self, steps: Sequence[int], now: int) -> bool:
        """Whether such targets have come since the training began, at a rate that stayed the same.

        Of three and more, the time until the first is held against those between them: of a Poisson
        process it is longer than w times their mean with probability (1 + w / (n - 1))^(1 - n).

        Args:
            steps: at which they explain a jump.
            now: values of later steps do not count.
        """
        known = [self._values[p] for p in map(self._place, steps) if p is not None]
        if not known:
            return False
        least = min(known)
        until = bisect_right(self._steps, now)
        at = [place for place in range(until) if self._values[place] >= least]
        gaps = len(at) - 1
        if gaps < 2 or at[-1] == at[0]:
            return True
        waited = (at[0] + 1) / ((at[-1] - at[0]) / gaps)
        return (1 + waited / gaps) ** -gaps >= _CHANCE

    def _place(self, step: int) -> int | None:
        place = bisect_left(self._steps, step)
        there = place < len(self._steps) and self._steps[place] == step
        return place if there else None
