"""Gradients that backward passes make, whatever is left of them when the optimizer steps."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from rankscope.server.detectors.mechanisms.series_by_step import median, together
from rankscope.server.window import Window

# What is read in a backward pass, or when gradients are clipped: both are before the step.
_BEFORE_THE_STEP = ("grad_norm_local", "grad_norm_preclip")
# Latest norms whose median is told.
_LATEST = 64


@dataclass(slots=True)
class GradientsMade:
    """Follows the norms of gradients before the step, means over the ranks."""

    latest: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST))

    def take(self, window: Window) -> None:
        """Takes the norms of a window that are above 0."""
        for _, row in together(window, *_BEFORE_THE_STEP):
            norms = [row[name] for name in _BEFORE_THE_STEP if row.get(name, 0.0) > 0]
            self.latest += [norm for norm in norms[:1] if math.isfinite(norm)]

    @property
    def norm(self) -> float:
        """Their median; NaN where there are none."""
        return median(list(self.latest)) if self.latest else math.nan

    def __bool__(self) -> bool:
        return bool(self.latest)
