"""Several series at once, step by step, and what their recent values say."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from rankscope.server.detectors.mechanisms.statistics import mean_over_ranks, rank_rows
from rankscope.server.window import Float64, Window


def together(window: Window, *metrics: str) -> Iterator[tuple[int, dict[str, float]]]:
    """Steps at which any of the metrics was posted, ascending, with their means over the ranks.

    A metric that nobody posted at a step is not in its dictionary.
    """
    rows: dict[int, dict[str, float]] = {}
    for metric in metrics:
        steps, means = mean_over_ranks(window, metric)
        for step, value in zip(steps.tolist(), means.tolist(), strict=True):
            rows.setdefault(step, {})[metric] = value
    yield from sorted(rows.items())


def mean_by_step(window: Window, metric: str) -> dict[int, float]:
    """Step -> mean over the ranks that posted a metric there, ascending."""
    steps, means = mean_over_ranks(window, metric)
    return dict(zip(steps.tolist(), means.tolist(), strict=True))


def rows_by_step(window: Window, metric: str) -> dict[int, Float64]:
    """Step -> value of every rank, float64 [R], NaN where one posted none; ascending."""
    steps, rows = rank_rows(window, metric)
    return dict(zip(steps.tolist(), rows, strict=True))


def noise_of_mean(values: Sequence[float]) -> float:
    """Standard error of the mean of N values, whatever their trend; 0 for fewer than 2.

    From the differences of neighbours (von Neumann 1941), which a slow trend hardly enters.
    """
    if len(values) < 2:
        return 0.0
    differences = np.diff(np.asarray(values, dtype=np.float64))
    return float(np.sqrt(np.mean(differences**2) / 2 / len(values)))


def median(values: Sequence[float]) -> float:
    """Median of the finite ones; NaN where there is none."""
    # Of some dozens Python's own sort is several times as fast as numpy's median.
    finite = sorted(filter(math.isfinite, values))
    count = len(finite)
    return float((finite[(count - 1) // 2] + finite[count // 2]) / 2) if count else math.nan
