"""Ranks whose model is given what another rank has computed: that is no data. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.window import Window

# Posted by later stages of a pipeline.
RECEIVED = "input_received"


@dataclass(slots=True)
class Received:
    """Attributes: ranks, which are so as soon as one of their inputs was."""

    ranks: set[int] = field(default_factory=set)

    def take(self, window: Window) -> None:
        """Learns of further ones."""
        for _, row in zip(*rank_rows(window, RECEIVED), strict=True):
            self.ranks |= set(window.ranks[row > 0].tolist())
