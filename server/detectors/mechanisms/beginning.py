"""The first losses of a run, and what has come of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

# First losses of which the highest is; losses before a beginning is judged, and the latest of these
# that are averaged: of 86 healthy trainings whose loss the first steps had thrown up none was above
# its first one by then, but for one whose second loss was that of another task.
FIRST, _PATIENCE, LATEST = 20, 100, 30
# How far above the first loss others are, as a share of it, where steps threw the parameters away:
# single batches of 16 and more differ by less.
RISE = 0.5


@dataclass(slots=True)
class Beginning:
    """Follows the losses from the first one on.

    Attributes:
        first_step: of the first loss.
        early, latest: the first losses, and the latest ones.
        count: how many there were.
    """

    first_step: int = -1
    early: list[float] = field(default_factory=list)
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))
    count: int = 0

    def push(self, step: int, loss: float) -> None:
        """Takes the next loss; finite."""
        if not self.count:
            self.first_step = step
        if len(self.early) < FIRST:
            self.early.append(loss)
        self.count += 1
        self.latest.append(loss)

    @property
    def begun_before(self) -> bool:
        """Whether the run goes on from what was trained before."""
        return self.first_step > 0

    @property
    def settled(self) -> bool:
        """Whether there are enough losses to judge it by."""
        return self.count >= _PATIENCE

    @property
    def first(self) -> float:
        """The first loss."""
        return self.early[0]

    @property
    def highest(self) -> float:
        """The highest of the first losses."""
        return max(self.early)

    @property
    def now(self) -> float:
        """Mean of the latest losses."""
        return float(np.mean(self.latest))
