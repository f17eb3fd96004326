"""Ranks of a parameter server that apply what workers push."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.push.applied import SERIES
from rankscope.server.window import Window


@dataclass(slots=True)
class Servers:
    """Attributes: ranks, those that have done so."""

    ranks: set[int] = field(default_factory=set)

    def take(self, window: Window) -> None:
        """Learns of those of a window."""
        self.ranks = self.until(window, window.last_step)

    def until(self, window: Window, step: int) -> set[int]:
        """Those that had done so at a step."""
        pushed = window.series.get(SERIES[0])
        if pushed is None:
            return self.ranks
        end = int(np.searchsorted(window.steps, step, side="right"))
        return self.ranks | set(window.ranks[pushed.present[:, :end].any(axis=1)].tolist())
