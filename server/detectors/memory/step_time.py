"""How long a step takes, and how much it reads: what growing memory is held against."""

from __future__ import annotations

import math

import numpy as np

from rankscope.server.detectors.mechanisms.series_by_step import rows_by_step
from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.window import Window

_LENGTH = "step_seconds"
# Samples of a step, and numbers in each of them: who keeps its data keeps that much.
_SAMPLES, _ELEMENTS = "samples", "sample_elements"
SERIES = (_LENGTH, _SAMPLES, _ELEMENTS)
# Bytes of the largest numbers that data are made of.
_WIDE = 8


class Lengths:
    """The mean length of a step, as far as it is known at each step of a window."""

    def __init__(self, window: Window, before: tuple[int, float]) -> None:
        steps, rows = rank_rows(window, _LENGTH)
        finite = np.where(np.isfinite(rows), rows, -np.inf).max(axis=1, initial=-np.inf)
        known = finite > -np.inf
        self._steps = steps[known]
        # Of all ranks the slowest: the others wait for it.
        self._sums = np.concatenate(([0.0], np.cumsum(finite[known])))
        self._before = before

    def mean(self, step: int) -> float:
        """Seconds, of all steps up to one; NaN where none is known."""
        at = int(np.searchsorted(self._steps, step, side="right"))
        number, total = self._before[0] + at, self._before[1] + float(self._sums[at])
        return total / number if number else math.nan

    def total(self) -> tuple[int, float]:
        """Number of steps whose lengths are known, and their sum."""
        return self._before[0] + len(self._steps), self._before[1] + float(self._sums[-1])


def inputs_of(window: Window) -> list[tuple[int, float]]:
    """Steps, and the bytes that their inputs have at the most, on the rank that has most."""
    elements = rows_by_step(window, _ELEMENTS)
    found = []
    for step, row in zip(*rank_rows(window, _SAMPLES), strict=True):
        sizes = _WIDE * row * elements.get(int(step), math.nan)
        if not np.isnan(sizes).all():
            found.append((int(step), float(np.nanmax(sizes))))
    return found
