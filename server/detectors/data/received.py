"""Ranks whose model is given what another rank has computed: that is no data. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.window import Bool, Int64, Window

# Posted by later stages of a pipeline.
RECEIVED = "input_received"


@dataclass(slots=True)
class Received:
    """Attributes: since, rank -> first step of which it is known."""

    since: dict[int, int] = field(default_factory=dict)

    def take(self, window: Window) -> None:
        """Learns of further ones."""
        for step, row in zip(*rank_rows(window, RECEIVED), strict=True):
            for rank in window.ranks[row > 0].tolist():
                self.since.setdefault(rank, int(step))

    def at(self, ranks: Int64, steps: Int64) -> Bool:
        """Whether ranks, [R], are known to be so at steps, [N]: bool [N, R]."""
        never = np.iinfo(np.int64).max
        since = np.array([self.since.get(rank, never) for rank in ranks.tolist()], dtype=np.int64)
        found: Bool = steps[:, None] >= since
        return found
