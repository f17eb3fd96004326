"""Ranks x steps: one metric of all ranks, so that who stands out is seen, not read."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import plotly.graph_objects as go

from rankscope.dashboard.figures.arrays import Bool, Curve, Float64, Int64, Mark, align, rank_list
from rankscope.dashboard.figures.bands import Crowd, outlying
from rankscope.dashboard.figures.cells import Scale, nothing, scale_of, value_traces
from rankscope.dashboard.figures.marks import mark_layout, with_marks
from rankscope.dashboard.figures.rows import rows_of
from rankscope.dashboard.figures.text import inert
from rankscope.dashboard.figures.theme import LIGHT, Theme, layout
from rankscope.dashboard.figures.units import axis_title

# From this ratio of the largest to the smallest value on, colours follow the logarithm.
_WIDE = 30.0


def metric_heatmap(
    curves: Sequence[Curve],
    *,
    metric: str,
    theme: Theme = LIGHT,
    suspects: Collection[int] = (),
    relative: bool = False,
    marks: Sequence[Mark] = (),
    x_range: tuple[float, float] | None = None,
) -> go.Figure:
    """One metric of all ranks, a row each.

    Of more than 128 ranks suspects and outliers have rows of their own; other rows share ranks, and
    show the one that lies farthest from the median of all.
    Colours span the 1st to the 99th percentile, of the logarithm where the values span a factor of
    30 and are all positive. What is not finite has a colour of its own.

    Args:
        curves: one a rank; where they are buckets, the end of a bucket is shown that lies farther
            from the median over the ranks.
        metric: name of the series.
        theme: colours.
        suspects: ranks that alerts name.
        relative: value over the median of the ranks at the step, instead of the value.
        marks: alerts.
        x_range: first and last step that the axis shows; default: those of the data.

    Returns:
        A figure; `layout.meta` has a summary, and the ranks with rows of their own as `marked`.
    """
    curves = sorted((c for c in curves if c.steps.size), key=lambda c: c.rank)
    settings = layout(theme)
    settings |= {
        "xaxis": {"title": {"text": "step"}, "tickformat": ",d", "showgrid": False},
        "yaxis": {"title": {"text": "rank"}, "showgrid": False, "fixedrange": True},
        "plot_bgcolor": theme.unchecked,
        "dragmode": "zoom",
        "hovermode": "closest",
        "margin": {"l": 56, "r": 16, "t": 22, "b": 42},
        "showlegend": False,
    }
    if not curves:
        settings["meta"] = {"summary": f"{metric}: no values yet", "marked": []}
        settings["xaxis"]["visible"] = settings["yaxis"]["visible"] = False
        settings["annotations"] = [nothing(f"No rank has posted {metric} at these steps", theme)]
        return go.Figure(data=[], layout=settings)
    ranks = [c.rank for c in curves]
    steps, values, there = _cells(curves, relative)
    strange = _outliers(curves)
    marked = sorted({*(r for r in suspects if r in set(ranks)), *strange})
    rows = rows_of(ranks, marked)
    center = _median(values)
    shown = rows.farthest(np.where(np.isfinite(values), values, np.nan), center)
    broken = rows.largest(there & ~np.isfinite(values))
    shown = np.where(broken, np.nan, shown)
    held = rows.largest(there)
    scale = _scale(values, relative)
    title = f"{metric} / median of ranks" if relative else axis_title(metric)
    traces = value_traces(
        shown,
        held,
        steps=steps,
        rows=rows.names(),
        scale=scale,
        theme=theme,
        title=inert(title, 60),
    )
    edges = x_range or with_marks((float(steps[0]) - 0.5, float(steps[-1]) + 0.5), marks)
    shapes, labels = mark_layout(marks, theme, edges)
    settings["shapes"] = [s for s in shapes if s["type"] == "line"] + rows.divider(theme)
    settings["annotations"] = labels
    settings["xaxis"]["range"] = list(edges)
    settings["yaxis"] |= rows.axis(marked) | {"range": [len(rows) - 0.5, -0.5]}
    settings["meta"] = {
        "summary": _summary(metric, ranks, steps, marked, bool(broken.any())),
        "marked": marked,
        "rows": len(rows),
        "names": rows.names(),
        "log": scale.log,
        "relative": relative,
    }
    return go.Figure(data=traces, layout=settings)


def _cells(curves: Sequence[Curve], relative: bool) -> tuple[Int64, Float64, Bool]:
    """Steps [S], values [R, S] and whether there is one.

    Of the ends of a bucket the one that lies farther from the median over the ranks is shown.
    """
    steps, means, low, high = align(curves)
    there = np.zeros(means.shape, np.bool_)
    for row, curve in enumerate(curves):
        there[row, np.searchsorted(steps, curve.steps)] = True
    center = _median(means)
    with np.errstate(invalid="ignore"):
        upper = np.abs(high - center) >= np.abs(center - low)
        values = np.where(np.isfinite(means), np.where(upper, high, low), means)
        # One bucket a rank and all of them alike: nothing to choose.
        values = np.where(low == high, means, values)
        if relative:
            values = values / np.where(center == 0, np.nan, center)
    return steps, values, there


def _median(values: Float64) -> Float64:
    """[S]: over the ranks, of what is finite; NaN where nothing is."""
    finite = np.where(np.isfinite(values), values, np.nan)
    result = np.full(values.shape[1], np.nan)
    some = np.isfinite(finite).any(axis=0)
    result[some] = np.nanmedian(finite[:, some], axis=0)
    return result


def _outliers(curves: Sequence[Curve]) -> list[int]:
    """Ranks that stay outside the others, and those with a value that is not finite."""
    broken = [c.rank for c in curves if not np.isfinite(c.values).all()]
    # Where most are, nobody stands out by it.
    return outlying(Crowd(curves)) + (broken if 2 * len(broken) < len(curves) else [])


def _scale(values: Float64, relative: bool) -> Scale:
    finite = values[np.isfinite(values)]
    positive = finite.size > 0 and bool(finite.min() > 0)
    if not relative:
        wide = positive and bool(np.percentile(finite, 99) > _WIDE * np.percentile(finite, 1))
        return scale_of(values, log=wide)
    # What all ranks do is 1: the scale has it inside and shows factors of two at least.
    scale = scale_of(values, log=positive)
    if scale.log:
        return Scale(True, min(scale.low, -0.3), max(scale.high, 0.3))
    return scale


def _summary(
    metric: str, ranks: Sequence[int], steps: Int64, marked: Sequence[int], broken: bool
) -> str:
    head = f"{metric} of {len(ranks)} ranks, steps {int(steps[0])} to {int(steps[-1])}"
    parts = [head]
    if marked:
        parts.append(f"marked: rank{'s' if len(marked) > 1 else ''} {rank_list(marked)}")
    if broken:
        parts.append("with values that are not finite")
    return "; ".join(parts)
