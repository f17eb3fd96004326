"""Gradients that backward passes make, whatever is left of them when the optimizer steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rankscope.server.window import Window

# What is read in a backward pass, or when gradients are clipped: both are before the step.
_BEFORE_THE_STEP = ("grad_norm_local", "grad_norm_preclip")


@dataclass(slots=True)
class GradientsMade:
    """Attributes: norm, the median over ranks and steps of the last window with any; else NaN."""

    norm: float = math.nan

    def take(self, window: Window) -> None:
        """Takes the norms of a window that are above 0."""
        for name in _BEFORE_THE_STEP:
            series = window.series.get(name)
            if series is None:
                continue
            norms = series.values[series.present]
            norms = norms[np.isfinite(norms) & (norms > 0)]
            if len(norms):
                self.norm = float(np.median(norms))
                return

    def __bool__(self) -> bool:
        return math.isfinite(self.norm)
