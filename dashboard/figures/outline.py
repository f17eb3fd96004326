"""Lines and areas as plotly wants them: what cannot be drawn is a gap."""

from __future__ import annotations

from typing import Any

import numpy as np

from rankscope.dashboard.figures.arrays import Float64, Int64

_GAP = np.array([np.nan])


def drawable(values: Float64, log_y: bool) -> Float64:
    """The values with NaN for what the axis cannot show."""
    shown = np.isfinite(values) & ((values > 0) | (not log_y))
    return np.where(shown, values, np.nan)


def polygons(steps: Int64, low: Float64, high: Float64) -> tuple[Float64, Float64]:
    """Outlines of the area between two lines, one for each stretch without a gap, NaN between."""
    there = np.isfinite(low) & np.isfinite(high)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], there, [False]]).astype(np.int8)))
    xs: list[Float64] = []
    ys: list[Float64] = []
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        part = slice(int(start), int(end))
        xs += [steps[part].astype(np.float64), steps[part][::-1].astype(np.float64), _GAP]
        ys += [high[part], low[part][::-1], _GAP]
    if not xs:
        return np.empty(0), np.empty(0)
    return np.concatenate(xs[:-1]), np.concatenate(ys[:-1])


def area(steps: Int64, low: Float64, high: Float64, *, log_y: bool, **meta: Any) -> dict[str, Any]:
    """The trace of the area between two lines, that says nothing by itself; gaps stay gaps.

    Args:
        meta: further facts by which the page knows the trace.
    """
    xs, ys = polygons(steps, drawable(low, log_y), drawable(high, log_y))
    return {
        "type": "scatter",
        "mode": "none",
        "x": xs,
        "y": ys,
        "fill": "toself",
        "hoverinfo": "skip",
        "showlegend": False,
        "meta": {**meta, "role": "envelope"},
    }
