"""What ranks post beside a reduction of theirs."""

from __future__ import annotations

import numpy as np

from rankscope.server.window import Reduction, Window


def value_of(window: Window, made: Reduction, name: str) -> float | None:
    """A number of the ranks of a reduction, at its step: their median; None where none posts it."""
    series = window.series.get(name)
    if series is None:
        return None
    column = int(np.searchsorted(window.steps, made.step))
    rows = np.isin(window.ranks, made.ranks) & series.present[:, column]
    return float(np.median(series.values[rows, column])) if rows.any() else None
