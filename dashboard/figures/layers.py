"""Layers x steps: a number of every tensor on one logarithmic scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from rankscope.dashboard.figures.arrays import Float64, Int64, Mark
from rankscope.dashboard.figures.cells import nothing, scale_of, value_traces
from rankscope.dashboard.figures.marks import mark_layout, with_marks
from rankscope.dashboard.figures.text import inert, number
from rankscope.dashboard.figures.theme import LIGHT, Theme, layout
from rankscope.dashboard.figures.units import axis_title

# More tensors than this share rows, in the model's order.
_MOST_ROWS = 160
_MOST_TICKS = 24


def layer_heatmap(
    names: Sequence[str],
    steps: Int64,
    low: Float64,
    high: Float64,
    *,
    metric: str,
    rank: int,
    theme: Theme = LIGHT,
    marks: Sequence[Mark] = (),
    x_range: tuple[float, float] | None = None,
    letters: int = 30,
    last: tuple[int, Float64] | None = None,
) -> go.Figure:
    """A number of every tensor: a vanished gradient is seen, not read.

    All tensors have one logarithmic scale, which holds the smallest and the largest value. An exact
    zero, and what is not finite, have colours of their own. A cell shows that of its values which
    lies farthest from the median of all, on the scale.

    Args:
        names: [T], in the model's order.
        steps: int64 [S], ascending.
        low, high: float64 [T, S]: smallest and largest value of each tensor and column of steps;
            NaN where there is none; a value that is not finite is `high`, as infinity.
        metric: what it is: `grad_norm`, `update_ratio`, `weight_norm`.
        rank: that reported it.
        theme: colours.
        marks: alerts.
        x_range: first and last step that the axis shows; default: those of the data.
        letters: of a name that fit beside the chart.
        last: step and values float64 [T] of the last sample, which the summary names; default:
            those of the last column.

    Returns:
        A figure; `layout.meta` has a summary, and as `zero` the tensors with a value of 0.
    """
    title = axis_title(metric)
    settings = layout(theme)
    settings |= {
        "xaxis": {"title": {"text": "step"}, "tickformat": ",d", "showgrid": False},
        "yaxis": {"showgrid": False, "fixedrange": True},
        "plot_bgcolor": theme.unchecked,
        "dragmode": "zoom",
        "hovermode": "closest",
        "margin": {"l": 40, "r": 16, "t": 22, "b": 42},
        "showlegend": False,
    }
    there = ~np.isnan(high)
    if not there.any():
        settings["meta"] = {"summary": f"{title}: nothing sampled at these steps", "zero": []}
        settings["xaxis"]["visible"] = settings["yaxis"]["visible"] = False
        settings["annotations"] = [nothing("No tensor was sampled at these steps", theme)]
        return go.Figure(data=[], layout=settings)
    scale = scale_of(np.stack([low, high]), log=True, robust=False)
    values = _farthest(low, high)
    width = -(-len(names) // _MOST_ROWS)
    shown, labels = _on_rows(values, names, width)
    held = ~np.isnan(shown)
    traces = value_traces(
        shown,
        held,
        steps=steps,
        rows=[inert(label) for label in labels],
        scale=scale,
        theme=theme,
        title=inert(title, 60),
    )
    edges = x_range or with_marks(_edges(steps), marks)
    shapes, symbols = mark_layout(marks, theme, edges)
    zero = [name for name, row in zip(names, low, strict=True) if (row == 0).any()]
    every = -(-len(labels) // _MOST_TICKS)
    settings["shapes"] = [s for s in shapes if s["type"] == "line"]
    settings["annotations"] = symbols
    settings["xaxis"]["range"] = list(edges)
    settings["yaxis"] |= {
        "range": [len(labels) - 0.5, -0.5],
        "tickvals": list(range(0, len(labels), every)),
        "ticktext": [inert(_short(label, letters)) for label in labels[::every]],
    }
    settings["meta"] = {
        "summary": _summary(title, names, rank, steps, low, high, zero, last),
        "zero": zero,
        "names": labels,
        "rank": rank,
    }
    return go.Figure(data=traces, layout=settings)


def _edges(steps: Int64) -> tuple[float, float]:
    """Half a cell beyond the first and the last step."""
    half = 0.5 * float(np.median(np.diff(steps))) if len(steps) > 1 else 0.5
    # There are no steps before 0, however wide its cell is.
    return max(float(steps[0]) - half, -0.5), float(steps[-1]) + half


def _logs(values: Float64) -> Float64:
    """log10, with -inf for zero: the farthest of all downwards."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log10(values))


def _farthest(low: Float64, high: Float64) -> Float64:
    """Of both ends the one farther from the median of all; what is not finite comes first."""
    logs = _logs(np.stack([low, high]))
    middle = np.median(logs[np.isfinite(logs)]) if np.isfinite(logs).any() else 0.0
    away = np.abs(logs - middle)
    upper = (away[1] >= away[0]) | np.isinf(high)
    return np.where(upper, high, low)


def _on_rows(values: Float64, names: Sequence[str], width: int) -> tuple[Float64, list[str]]:
    if width == 1:
        return values, list(names)
    logs = _logs(values)
    middle = np.median(logs[np.isfinite(logs)]) if np.isfinite(logs).any() else 0.0
    away = np.where(np.isnan(values), -1.0, np.abs(logs - middle))
    rows, labels = [], []
    for start in range(0, len(names), width):
        part = slice(start, start + width)
        chosen = np.argmax(away[part], axis=0)
        rows.append(values[part][chosen, np.arange(values.shape[1])])
        more = len(names[part]) - 1
        labels.append(names[start] + (f" and {more} more" if more else ""))
    return np.stack(rows), labels


def _short(name: str, letters: int) -> str:
    """The end of a name says more than its beginning."""
    return name if len(name) <= letters else "\u2026" + name[1 - letters :]


def _summary(
    title: str,
    names: Sequence[str],
    rank: int,
    steps: Int64,
    low: Float64,
    high: Float64,
    zero: Sequence[str],
    last: tuple[int, Float64] | None,
) -> str:
    parts = [f"{title} of {len(names)} tensors of rank {rank}"]
    parts[0] += f", steps {int(steps[0])} to {int(steps[-1])}"
    # Those of the end: over all steps, a layer that vanishes late would not stand out.
    step, values = last or (int(steps[-1]), high[:, -1])
    positive = np.where((values > 0) & np.isfinite(values), values, np.nan)
    if np.isfinite(positive).any():
        least, most = int(np.nanargmin(positive)), int(np.nanargmax(positive))
        parts.append(
            f"at step {step}: smallest {names[least]} ({number(float(positive[least]))}), "
            f"largest {names[most]} ({number(float(positive[most]))})"
        )
    if zero:
        more = f" and {len(zero) - 3} more" if len(zero) > 3 else ""
        parts.append(f"zero in {', '.join(zero[:3])}{more}")
    if np.isinf(high).any():
        parts.append("with values that are not finite")
    return "; ".join(parts)


def reduced(steps: Int64, values: Float64, *, columns: int) -> tuple[Int64, Float64, Float64]:
    """Many sampled steps in few columns of equal width.

    Args:
        steps: int64 [S], ascending.
        values: float64 [T, S]; NaN where there is none, infinity for what is not finite.
        columns: at most this many.

    Returns:
        First sampled step of each column int64 [C], smallest and largest values float64 [T, C].
    """
    if len(steps) <= columns:
        return steps, values, values
    width = -(-int(steps[-1] - steps[0] + 1) // columns)
    starts = np.flatnonzero(np.diff((steps - steps[0]) // width, prepend=-1))
    low: Any = np.fmin.reduceat(values, starts, axis=1)
    high: Any = np.fmax.reduceat(values, starts, axis=1)
    return steps[starts], low, high
