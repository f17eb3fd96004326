"""Many ranks on one chart: the median over the ranks and quantile bands around it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from rankscope.dashboard.figures.arrays import Curve, Float64, Int64, align
from rankscope.dashboard.figures.outline import drawable, polygons
from rankscope.dashboard.figures.smoothing import smooth
from rankscope.dashboard.figures.theme import Theme, faded

# Pairs of percentiles: the range, then the mean +- 1.5, 1 and 0.5 standard deviations of a normal
# distribution, as TensorBoard's distribution dashboard draws them.
BANDS = ((0.0, 100.0), (7.0, 93.0), (16.0, 84.0), (31.0, 69.0))
_OPACITY = (0.10, 0.14, 0.18, 0.24)
_MAX_OUTLYING = 3


class Crowd:
    """Many ranks on their common steps, with what bands and outliers are both found by.

    Values that are not finite take no part.
    """

    def __init__(self, curves: Sequence[Curve]) -> None:
        self.ranks = [curve.rank for curve in curves]
        # Steps int64 [S], the others float64 [R, S], see `align`.
        self.steps, values, self.low, self.high = align(curves)
        there = np.isfinite(values)
        self.finite = values if there.all() else np.where(there, values, np.nan)
        self.counts = there.sum(axis=0)

    @cached_property
    def _ordered(self) -> Float64:
        """The finite values of each step, ascending; NaN after them."""
        return np.sort(self.finite, axis=0)

    def percentile(self, wanted: float) -> Float64:
        """Over the ranks, step by step [S], as `numpy.percentile` has it; NaN where there is none.

        Every percentile is read off the values in order: these are put so once, and not, as by
        numpy, for each.
        """
        place = wanted / 100 * np.maximum(self.counts - 1, 0)
        below = np.floor(place).astype(np.int64)
        above = np.minimum(below + 1, np.maximum(self.counts - 1, 0))
        columns = np.arange(len(self.steps))
        lower, upper = self._ordered[below, columns], self._ordered[above, columns]
        share, span = place - below, upper - lower
        # From the nearer end, so that it is exact at both.
        return np.asarray(
            np.where(share < 0.5, lower + span * share, upper - span * (1 - share)), np.float64
        )


def band_traces(
    crowd: Crowd, *, theme: Theme, smoothing: float, log_y: bool
) -> list[dict[str, Any]]:
    """Four nested bands over the ranks, and their median on top.

    Values that are not finite take no part. The outermost band is the range over all ranks and,
    where the data are buckets, over all steps of a bucket: no spike of a single rank disappears.
    """
    steps = crowd.steps
    traces: list[dict[str, Any]] = []
    if not steps.size:
        return traces
    # Steps that few ranks sampled would make the quantiles jump; only the range is drawn there.
    enough = crowd.counts * 4 >= crowd.counts.max(initial=1)
    bottom, top = _extreme(crowd.low, np.fmin), _extreme(crowd.high, np.fmax)
    for (lower, upper), opacity in zip(BANDS, _OPACITY, strict=True):
        if lower == 0.0:
            x, low, high = steps, bottom, top
        else:
            x = steps[enough]
            low, high = crowd.percentile(lower)[enough], crowd.percentile(upper)[enough]
        xs, ys = polygons(x, floored(low, log_y), drawable(high, log_y))
        traces.append(
            {
                "type": "scatter",
                "mode": "none",
                "x": xs,
                "y": ys,
                "fill": "toself",
                "fillcolor": faded(theme.accent, opacity),
                "hoverinfo": "skip",
                "name": "all ranks" if lower == 0.0 else f"{lower:.0f} to {upper:.0f} % of ranks",
                "meta": {"role": "band", "percentiles": [lower, upper]},
            }
        )
    center = smooth(crowd.percentile(50.0)[enough], smoothing)
    traces.append(_median(steps[enough], center, bottom[enough], top[enough], theme, log_y))
    return traces


def outlying(crowd: Crowd) -> list[int]:
    """Up to three ranks that stay outside the others most of the time, the farthest first.

    Statistic: the median over the steps of |value - median over ranks| / (1.4826 MAD over ranks);
    listed from 6 on, a distance that no rank of a normally distributed crowd keeps up.
    """
    if len(crowd.ranks) < 4 or not crowd.steps.size:
        return []
    usable = crowd.counts >= 4
    if not usable.any():
        return []
    some = slice(None) if usable.all() else usable
    finite, center = crowd.finite[:, some], crowd.percentile(50.0)[some]
    distance = np.abs(finite - center)
    # What takes no account of NaN is ten times as fast.
    median = np.median if np.isfinite(finite).all() else np.nanmedian
    spread = 1.4826 * median(distance, axis=0)
    # Ranks that agree to the last digit leave no spread; then rounding alone is no outlier.
    spread = np.maximum(spread, 1e-6 * np.abs(center) + 1e-300)
    deviations = distance / spread
    if np.isfinite(deviations).all():
        score = np.median(deviations, axis=1)
    else:
        score = np.array([_median_of(row) for row in deviations])
    order = np.argsort(-score, kind="stable")[:_MAX_OUTLYING]
    return [crowd.ranks[i] for i in order if score[i] >= 6.0]


def floored(values: Float64, log_y: bool) -> Float64:
    """The lower edge of a band on a log axis: the smallest positive value instead of 0 or less."""
    finite = np.where(np.isfinite(values), values, np.nan)
    if not log_y:
        return finite
    positive = finite[finite > 0]
    least = float(positive.min()) if positive.size else np.nan
    return np.where(finite > 0, finite, np.where(np.isnan(finite), np.nan, least))


def _median(
    steps: Int64, center: Float64, low: Float64, high: Float64, theme: Theme, log_y: bool
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": steps,
        "y": drawable(center, log_y),
        "name": "median",
        "line": {"color": theme.accent, "width": 1.8},
        "customdata": np.stack([low, high], axis=1),
        "hovertemplate": "%{y:.6g} (ranks %{customdata[0]:.4g} to %{customdata[1]:.4g})",
        "meta": {"role": "median"},
    }


def _extreme(values: Float64, pick: np.ufunc) -> Float64:
    return np.asarray(pick.reduce(np.where(np.isfinite(values), values, np.nan), axis=0))


def _median_of(row: Float64) -> float:
    there = row[np.isfinite(row)]
    return float(np.median(there)) if there.size else 0.0
