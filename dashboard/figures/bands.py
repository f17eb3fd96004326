"""Many ranks on one chart: the median over the ranks and quantile bands around it."""

from __future__ import annotations

from collections.abc import Sequence
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


def band_traces(
    curves: Sequence[Curve], *, theme: Theme, smoothing: float, log_y: bool
) -> list[dict[str, Any]]:
    """Four nested bands over the ranks, and their median on top.

    Values that are not finite take no part. The outermost band is the range over all ranks and,
    where the data are buckets, over all steps of a bucket: no spike of a single rank disappears.
    """
    steps, values, low, high = align(curves)
    traces: list[dict[str, Any]] = []
    if not steps.size:
        return traces
    finite = np.where(np.isfinite(values), values, np.nan)
    counts = np.isfinite(finite).sum(axis=0)
    # Steps that few ranks sampled would make the quantiles jump; only the range is drawn there.
    enough = counts * 4 >= counts.max(initial=1)
    percentiles = [p for pair in BANDS[1:] for p in pair] + [50.0]
    quantiles = dict(zip(percentiles, _percentiles(finite[:, enough], percentiles), strict=True))
    for (lower, upper), opacity in zip(BANDS, _OPACITY, strict=True):
        if lower == 0.0:
            x, bottom, top = steps, _extreme(low, np.fmin), _extreme(high, np.fmax)
        else:
            x, bottom, top = steps[enough], quantiles[lower], quantiles[upper]
        xs, ys = polygons(x, floored(bottom, log_y), drawable(top, log_y))
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
    bottom, top = _extreme(low, np.fmin)[enough], _extreme(high, np.fmax)[enough]
    traces.append(
        _median(steps[enough], smooth(quantiles[50.0], smoothing), bottom, top, theme, log_y)
    )
    return traces


def outlying(curves: Sequence[Curve]) -> list[int]:
    """Up to three ranks that stay outside the others most of the time, the farthest first.

    Statistic: the median over the steps of |value - median over ranks| / (1.4826 MAD over ranks);
    listed from 6 on, a distance that no rank of a normally distributed crowd keeps up.
    """
    steps, values, _, _ = align(curves)
    if len(curves) < 4 or not steps.size:
        return []
    finite = np.where(np.isfinite(values), values, np.nan)
    usable = np.isfinite(finite).sum(axis=0) >= 4
    if not usable.any():
        return []
    finite = finite[:, usable]
    # What takes no account of NaN is ten times as fast.
    median = np.median if np.isfinite(finite).all() else np.nanmedian
    center = median(finite, axis=0)
    spread = 1.4826 * median(np.abs(finite - center), axis=0)
    # Ranks that agree to the last digit leave no spread; then rounding alone is no outlier.
    spread = np.maximum(spread, 1e-6 * np.abs(center) + 1e-300)
    deviations = np.abs(finite - center) / spread
    if np.isfinite(deviations).all():
        score = np.median(deviations, axis=1)
    else:
        score = np.array([_median_of(row) for row in deviations])
    order = np.argsort(-score, kind="stable")[:_MAX_OUTLYING]
    return [curves[i].rank for i in order if score[i] >= 6.0]


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


def _percentiles(values: Float64, wanted: Sequence[float]) -> Float64:
    if np.isfinite(values).all():
        return np.asarray(np.percentile(values, wanted, axis=0))
    result = np.full((len(wanted), values.shape[1]), np.nan)
    some = np.isfinite(values).any(axis=0)
    result[:, some] = np.nanpercentile(values[:, some], wanted, axis=0)
    return result


def _extreme(values: Float64, pick: np.ufunc) -> Float64:
    return np.asarray(pick.reduce(np.where(np.isfinite(values), values, np.nan), axis=0))


def _median_of(row: Float64) -> float:
    there = row[np.isfinite(row)]
    return float(np.median(there)) if there.size else 0.0
