"""Ranks with a learning rate of their own: stages of a pipeline, owners of a part of the model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.detectors.mechanisms.wording import ranks
from rankscope.server.window import Window

# Times the rate of most ranks, from which on a rate is one of its own: by so much a rate that a
# training does not stand differs from one that it does.
_APART = 3.0


@dataclass(slots=True)
class Fastest:
    """The highest rate of each rank so far."""

    highest: dict[int, float] = field(default_factory=dict)

    def take(self, window: Window) -> None:
        """Takes a window's rates."""
        rows = rank_rows(window, "lr")[1]
        most = np.fmax.reduce(np.where(np.isfinite(rows), rows, np.nan), axis=0, initial=-np.inf)
        for rank, rate in zip(window.ranks.tolist(), most.tolist(), strict=True):
            self.highest[rank] = max(self.highest.get(rank, -math.inf), rate)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those far above most of the others; none where all have the same."""
        if len(self.highest) < 2:
            return ()
        usual = sorted(self.highest.values())[(len(self.highest) - 1) // 2]
        return tuple(r for r, rate in sorted(self.highest.items()) if rate > _APART * usual > 0)

    @property
    def rate(self) -> float:
        """The highest of all."""
        return max(self.highest.values(), default=math.nan)

    def where(self) -> str:
        """Which ranks it is of, for a sentence; empty where all have the same."""
        return f" of {ranks(self.ranks)}" if self.ranks else ""
