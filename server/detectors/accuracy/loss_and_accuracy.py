"""A loss and an accuracy side by side: where both have gone of late."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.mechanisms.series_by_step import noise_of_mean
from rankscope.server.detectors.mechanisms.statistics import BLOCK, Progress, mann_kendall

# Blocks at either end whose mean is the level there.
_ENDS = 4


@dataclass(slots=True)
class Course:
    """The last observations of both, in blocks of 10.

    Args:
        blocks: this many.
        beginning: number of accuracies that are kept of the run's first steps.
        soon: blocks with which it is judged already; 0: all of them.

    Attributes:
        recent: step, loss and accuracy.
        first: the accuracies of the first steps.
        progress: of the loss since the run's first step.
        lowest: level of the loss before the observations remembered, the lowest so far.
    """

    blocks: int
    beginning: int = 0
    soon: int = 0
    recent: deque[tuple[int, float, float]] = field(init=False)
    first: list[float] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)
    lowest: float = math.inf
    _medians: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self.recent = deque(maxlen=self.blocks * BLOCK)
        self._medians = deque(maxlen=self.blocks)

    @property
    def needed(self) -> int:
        """Observations before it is judged for the first time."""
        return (self.soon or self.blocks) * BLOCK

    @property
    def whole(self) -> bool:
        """Whether as many are remembered as are judged at a time later on."""
        return len(self.recent) == self.blocks * BLOCK

    @property
    def first_step(self) -> int:
        """Of the observations remembered."""
        return self.recent[0][0]

    def push(self, step: int, row: dict[str, float]) -> bool:
        """Takes `loss` and `accuracy` of a step if both are finite; returns whether to judge."""
        loss, accuracy = row.get("loss", math.nan), row.get("accuracy", math.nan)
        if not (math.isfinite(loss) and math.isfinite(accuracy)):
            return False
        self.progress.push(step, loss)
        self.recent.append((step, loss, accuracy))
        if len(self.first) < self.beginning:
            self.first.append(accuracy)
        if self.progress.count % BLOCK:
            return False
        if len(self._medians) == self.blocks:
            self.lowest = min(self.lowest, _level(list(self._medians)[:_ENDS]))
        newest = list(self.recent)[-BLOCK:]
        self._medians.append(float(np.median([loss for _, loss, _ in newest])))
        return len(self.recent) >= self.needed

    def fall(self, least: float, trend: float) -> tuple[float, float] | None:
        """The loss in the first and in the last four blocks, where it falls; None where not.

        Where it was as low before (a restart of the learning rate had raised it, say), the fall
        takes back a rise, and nothing is to be expected of it.

        Args:
            least: share of its start.
            trend: Mann-Kendall Z, of the blocks' medians.
        """
        blocks = list(self._medians)
        before, after = _level(blocks[:_ENDS]), _level(blocks[-_ENDS:])
        new = min(before, self.lowest) - after
        falls = new > least * abs(self.progress.start) and mann_kendall(blocks) < -trend
        return (before, after) if falls else None

    def latest(self) -> float:
        """Median loss of the newest block."""
        return self._medians[-1]

    def changes(self) -> float:
        """Share of the accuracies that are another number than the one before."""
        accuracies = [accuracy for _, _, accuracy in self.recent]
        pairs = list(zip(accuracies, accuracies[1:], strict=False))
        return sum(a != b for a, b in pairs) / max(len(pairs), 1)

    def halves(self) -> tuple[float, float, float]:
        """Means of the accuracy in both halves, and the standard error of their difference.

        That of neighbouring differences (von Neumann 1941), which a trend hardly enters.
        """
        accuracies = [accuracy for _, _, accuracy in self.recent]
        half = len(accuracies) // 2
        error = math.sqrt(2) * noise_of_mean(accuracies[half:])
        return float(np.mean(accuracies[:half])), float(np.mean(accuracies[half:])), error


def _level(medians: Sequence[float]) -> float:
    return float(np.mean(medians))
