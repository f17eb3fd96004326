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


def single(values: Float64) -> np.ndarray[Any, np.dtype[np.floating[Any]]]:
    """Values of buckets in single precision, half as much to send, unless that would change them.

    Roll-ups are kept so, and a chart shows six digits; what is too large or too small for it stays
    as it is.
    """
    size = np.abs(values[np.isfinite(values) & (values != 0)])
    limits = np.finfo(np.float32)
    if size.size and not limits.tiny <= size.min() <= size.max() <= limits.max:
        return values
    return values.astype(np.float32)


def _exact(steps: Float64) -> np.ndarray[Any, np.dtype[np.floating[Any]]]:
    """Steps in single precision where all of them are the same in it."""
    # Whole numbers up to here have a float32 each.
    fits = not steps.size or np.nanmax(np.abs(steps)) < 2**24
    return steps.astype(np.float32) if fits else steps


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
        "x": _exact(xs),
        "y": single(ys),
        "fill": "toself",
        "hoverinfo": "skip",
        "showlegend": False,
        "meta": {**meta, "role": "envelope"},
    }
