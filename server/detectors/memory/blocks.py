"""What is remembered of a series: the smallest values of blocks, in bounded memory. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rankscope.server.window import Float64

# Observations in a block at first; blocks that are kept: of this many, two each become one.
_SIZE, _MOST = 4, 128


@dataclass(slots=True)
class Minima:
    """For each rank the smallest value of each block of observations, since its process began.

    Attributes:
        size: observations in a block.
        steps: mean step of each block.
        rows: float64 [R] each, by the rank's number; NaN where it posted nothing.
    """

    size: int = _SIZE
    steps: list[float] = field(default_factory=list)
    rows: list[Float64] = field(default_factory=list)
    _waiting: list[int] = field(default_factory=list)
    _open: Float64 = field(default_factory=lambda: np.empty(0))

    def push(self, step: int, values: Float64) -> bool:
        """Takes one observation, float64 [R]; says whether a block is complete with it."""
        self._widen(len(values))
        self._waiting.append(step)
        self._open = np.fmin(self._open, values)
        if len(self._waiting) < self.size:
            return False
        self.steps.append(sum(self._waiting) / len(self._waiting))
        self.rows.append(self._open)
        self._waiting, self._open = [], np.full(len(values), np.nan)
        if len(self.rows) == _MOST:
            pairs = range(0, _MOST, 2)
            self.steps = [(self.steps[n] + self.steps[n + 1]) / 2 for n in pairs]
            self.rows = [np.fmin(self.rows[n], self.rows[n + 1]) for n in pairs]
            self.size *= 2
        return True

    def forget(self, rank: int) -> None:
        """Another process has taken the rank's place, and has memory of its own."""
        if rank < len(self._open):
            for row in (*self.rows, self._open):
                row[rank] = np.nan

    def of(self, rank: int) -> tuple[Float64, Float64]:
        """Steps and smallest values of the blocks in which a rank posted something."""
        values = np.array([row[rank] for row in self.rows])
        known = np.isfinite(values)
        return np.array(self.steps)[known], values[known]

    def matrix(self) -> Float64:
        """Float64 [blocks, R]."""
        return np.stack(self.rows)

    def _widen(self, count: int) -> None:
        """Ranks may come later; they have posted nothing yet."""
        more = count - len(self._open)
        if more > 0:
            self._open = np.concatenate([self._open, np.full(more, np.nan)])
            self.rows = [np.concatenate([row, np.full(more, np.nan)]) for row in self.rows]
