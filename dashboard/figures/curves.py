"""Per-rank curves: a line a rank, or, of many ranks, their median and quantile bands."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from rankscope.dashboard.figures.arrays import Curve, Float64, Mark, rank_list
from rankscope.dashboard.figures.bands import Crowd, band_traces, outlying
from rankscope.dashboard.figures.labels import SUSPECT_SIGN, end_labels
from rankscope.dashboard.figures.marks import mark_layout, with_marks
from rankscope.dashboard.figures.nonfinite import Episode, episodes, nonfinite_trace
from rankscope.dashboard.figures.outline import area, drawable, single
from rankscope.dashboard.figures.smoothing import smooth
from rankscope.dashboard.figures.text import inert, number
from rankscope.dashboard.figures.theme import LIGHT, Theme, faded, layout, rank_color
from rankscope.dashboard.figures.units import axis_title

MAX_LINES = 16
# Points are drawn besides the line where they are so few that they can be distinguished.
_FEW_POINTS = 60
# Percent of the values at each end without which the usual range is found, of so many at least, and
# how many times as wide all of them must be; and what is left free, as plotly does.
_ENDS, _ENOUGH, _FLAT, _PADDING = 1.0, 100, 4.0, 0.05
# Some units in the last place of float32 (1.2e-7): a rate of 0.02 that is 0.0199999996 at some
# steps is one value, and ticks between both would tell of nothing else.
_ROUNDING = 4e-7
# On shorter axes plotly would put ticks between the steps.
_FEW_STEPS = 8
# More rows than this in one hover box cover the chart.
_UNIFIED_LINES = 8
# Half of 256 ranks may be suspects: then the bands show the story, and a few lines are examples.
_MAX_NAMED = 8


def rank_curves(
    curves: Sequence[Curve],
    *,
    metric: str,
    theme: Theme = LIGHT,
    smoothing: float = 0.0,
    log_y: bool = False,
    highlight: Collection[int] = (),
    suspects: Collection[int] = (),
    whole: bool = False,
    marks: Sequence[Mark] = (),
    x_range: tuple[float, float] | None = None,
    color_ranks: Sequence[int] | None = None,
    legend: bool = True,
) -> go.Figure:
    """One metric of all ranks over the steps.

    Up to `MAX_LINES` ranks: a line each. More: the median over the ranks and bands of quantiles,
    with the highlighted ranks, and up to three that stay outside the others, as lines on top.
    Values that are not finite are marked at the top edge. On a log axis values <= 0 are gaps, and a
    note counts them.

    Args:
        curves: one a rank.
        metric: name of the series; it gives the title of the y axis, with its unit.
        theme: colours.
        smoothing: weight of the moving average, see `smooth`; the raw line stays, faded.
        log_y: logarithmic y axis.
        highlight: ranks that are drawn on top, in their own colours, and named at their end.
        suspects: those that alerts name: where they are highlighted, a sign stands before the name.
        whole: the y axis shows all values; else a few that lie far from all others are cut off,
            which a note says.
        marks: alerts.
        x_range: first and last step that the axis shows; default: those of the data.
        color_ranks: all ranks of the run, so that a rank keeps its colour where some are left out;
            default: those of `curves`.
        legend: whether to name the lines beside the chart; a page has its own legend.

    Returns:
        A figure; `layout.meta.summary` says in a sentence what is on it.

    Raises:
        ValueError: the smoothing weight is outside of [0, 1).
    """
    curves = sorted(curves, key=lambda c: c.rank)
    ranks = [c.rank for c in curves]
    many = len(curves) > MAX_LINES
    wanted, blamable = set(highlight), set(suspects)
    named = [r for r in ranks if r in wanted][:_MAX_NAMED]
    traces: list[dict[str, Any]] = []
    if many:
        crowd = Crowd(curves)
        named += [r for r in outlying(crowd) if r not in named]
        traces += band_traces(crowd, theme=theme, smoothing=smoothing, log_y=log_y)
    lines = [c for c in curves if c.rank in named] if many else curves
    colors = _colors(lines, color_ranks or ranks, theme)
    # The highlighted ones come last: what is drawn last lies on top.
    for curve in sorted(lines, key=lambda c: c.rank in named):
        # Where all are named none stands out.
        stands_out = curve.rank in named and len(named) < len(curves)
        emphasis = 1 if stands_out else (-1 if len(named) in range(1, len(curves)) else 0)
        traces += _line_traces(
            curve,
            color=colors.get(curve.rank, theme.muted),
            emphasis=emphasis,
            smoothing=smoothing,
            log_y=log_y,
        )
    broken = episodes(curves)
    if broken:
        traces.append(nonfinite_trace(broken, theme))

    span = x_range or with_marks(_span(curves), marks)
    shapes, labels = mark_layout(marks, theme, span)
    # Of bands these are a million: found once.
    values = np.zeros(0) if log_y else _drawn(curves)
    usual = None if whole or log_y else usual_range(values)
    height = 0.0 if log_y else _height(values, usual)
    blamed = {rank for rank in named if rank in blamable}
    for of, ink, sign in ((True, theme.critical, SUSPECT_SIGN), (False, theme.text, "")):
        ends = [c for c in lines if c.rank in named and (c.rank in blamed) == of]
        labels += end_labels(ends, ink, log_y, sign=sign, span=height)
    if usual is not None:
        labels.append(_note(_cut_note(values, usual), theme))
    note = _log_note(curves) if log_y else ""
    if note:
        labels.append(_note(note, theme))
    settings = layout(theme)
    settings |= {
        "xaxis": {
            "title": {"text": "step"},
            "range": _padded(span),
            "tickformat": ",d",
            # Between two steps there is none: a tick there would repeat the number beside it.
            **({"dtick": 1} if span[1] - span[0] < _FEW_STEPS else {}),
            "unifiedhovertitle": {"text": "step %{x:,d}"},
        },
        "yaxis": {
            "title": {"text": inert(axis_title(metric), 60)},
            "type": "log" if log_y else "linear",
            "exponentformat": "e",
            "minexponent": 4,
            **({} if log_y else _around_one_value(values)),
            **({} if usual is None else {"range": list(usual)}),
            # Zooming is along the steps; y follows the data that are shown.
            "fixedrange": True,
        },
        "yaxis2": {
            "overlaying": "y",
            "range": [0, 1],
            "visible": False,
            "fixedrange": True,
            "side": "right",
        },
        "hovermode": "x unified" if many or len(lines) <= _UNIFIED_LINES else "closest",
        "dragmode": "zoom",
        "showlegend": legend and bool(traces),
        "shapes": shapes,
        "annotations": labels,
        "margin": {"l": 60, "r": (68 if blamed else 58) if named else 16, "t": 18, "b": 42},
        "meta": {
            "summary": _summary(metric, curves, broken, named),
            "ranks": len(curves),
            "drawn": "bands" if many else "lines",
            "buckets": any(c.minimum is not None for c in curves),
            "named": named,
            "suspects": sorted(blamed),
            "cut": usual is not None,
            "colors": {} if many else {str(rank): color for rank, color in colors.items()},
        },
    }
    return go.Figure(data=traces, layout=settings)


def _colors(lines: Sequence[Curve], everyone: Sequence[int], theme: Theme) -> dict[int, str]:
    """Of the ranks that have a line, by their places among all."""
    drawn = {curve.rank for curve in lines}
    return {
        rank: rank_color(place, len(everyone), theme)
        for place, rank in enumerate(everyone)
        if rank in drawn
    }


def _line_traces(
    curve: Curve, *, color: str, emphasis: int, smoothing: float, log_y: bool
) -> list[dict[str, Any]]:
    name = f"rank {curve.rank}"
    traces: list[dict[str, Any]] = []
    if curve.minimum is not None and curve.maximum is not None:
        traces.append(
            {
                **_envelope(curve, log_y),
                "fillcolor": faded(color, 0.22 if emphasis > 0 else 0.12),
                "legendgroup": name,
            }
        )
    values = drawable(curve.values, log_y)
    width = 2.0 if emphasis > 0 else (1.1 if emphasis < 0 else 1.6)
    raw: dict[str, Any] = {
        "type": "scatter",
        "x": curve.steps,
        "y": values,
        "name": name,
        "legendgroup": name,
        "meta": {"rank": curve.rank, "role": "raw"},
        "line": {"color": color, "width": width},
        "opacity": 0.75 if emphasis < 0 else 1.0,
        "hovertemplate": "%{y:.6g}",
        **_points(values),
    }
    if curve.minimum is not None and curve.maximum is not None:
        raw["y"] = single(values)
        raw["customdata"] = single(np.stack([curve.minimum, curve.maximum], axis=1))
        raw["hovertemplate"] = "%{y:.6g} (%{customdata[0]:.4g} to %{customdata[1]:.4g})"
    traces.append(raw)
    if smoothing > 0.0:
        raw["opacity"] = 0.3
        raw["line"]["width"] = 1
        raw["hoverinfo"], raw["hovertemplate"] = "skip", None
        raw["showlegend"] = False
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": curve.steps,
                "y": drawable(smooth(curve.values, smoothing), log_y),
                "name": name,
                "legendgroup": name,
                "meta": {"rank": curve.rank, "role": "smoothed"},
                "line": {"color": color, "width": 2.25},
                "customdata": curve.values,
                "hovertemplate": "%{y:.6g} (raw %{customdata:.6g})",
            }
        )
    return traces


def _points(values: Float64) -> dict[str, Any]:
    """Lines; with points where there are few, or where one stands alone between two gaps."""
    if len(values) <= _FEW_POINTS:
        return {"mode": "lines+markers", "marker": {"size": 4}}
    there = np.isfinite(values)
    alone = there & ~np.roll(there, 1) & ~np.roll(there, -1)
    if alone.any():
        return {"mode": "lines+markers", "marker": {"size": np.where(alone, 4, 0)}}
    return {"mode": "lines"}


def _envelope(curve: Curve, log_y: bool) -> dict[str, Any]:
    """The area between the smallest and the largest value of each bucket; gaps stay gaps."""
    low, high = np.asarray(curve.minimum), np.asarray(curve.maximum)
    return area(curve.steps, low, high, log_y=log_y, rank=curve.rank)


def _span(curves: Sequence[Curve]) -> tuple[float, float]:
    firsts = [int(c.steps[0]) for c in curves if c.steps.size]
    lasts = [int(c.steps[-1]) for c in curves if c.steps.size]
    return (float(min(firsts)), float(max(lasts))) if firsts else (0.0, 1.0)


def _padded(span: tuple[float, float]) -> list[float]:
    low, high = span
    room = max((high - low) * 0.01, 0.5 if high == low else 0.01)
    return [low - room, high + room]


def _drawn(curves: Sequence[Curve]) -> Float64:
    """All finite values and extremes, [any number]."""
    parts = [p for c in curves for p in (c.values, c.minimum, c.maximum) if p is not None]
    drawn = np.concatenate([np.zeros(0), *parts])
    found: Float64 = drawn[np.isfinite(drawn)]
    return found


def usual_range(values: Float64) -> tuple[float, float] | None:
    """The y range without what would flatten the rest of some values; None where nothing does.

    A hundredth of the values at each end may be cut off, and is where the range of all is more than
    four times that of the others: these would have less than a quarter of the height.
    """
    if len(values) < _ENOUGH:
        return None
    low, high = np.percentile(values, [_ENDS, 100 - _ENDS])
    span = float(high - low)
    if span <= 0 or values.max() - values.min() <= _FLAT * span:
        return None
    # What lies so near the others that it does not flatten them is not cut off.
    reach = (_FLAT - 1) / 2 * span
    below, above = float(low) - reach, float(high) + reach
    near = values[(values >= below) & (values <= above)]
    room = _PADDING * float(near.max() - near.min())
    return float(near.min()) - room, float(near.max()) + room


def _around_one_value(values: Float64) -> dict[str, Any]:
    """Range of the y axis where all values are one that is small.

    Plotly would show it in the middle of 2: a learning rate of 0.002 stood at what looks like 0.
    """
    if not values.size or not 0 < abs(values[0]) < 1:
        return {}
    if values.max() - values.min() > _ROUNDING * abs(values[0]):
        return {}
    return {"range": sorted((0.0, 2.0 * float(values[0])))}


def _height(values: Float64, usual: tuple[float, float] | None) -> float:
    """What the linear axis shows."""
    low, high = usual or ((values.min(), values.max()) if values.size else (0.0, 0.0))
    return float(high - low)


def _cut_note(values: Float64, usual: tuple[float, float]) -> str:
    beyond = int(((values < usual[0]) | (values > usual[1])).sum())
    ends = [number(float(v)) for v in (values.min(), values.max()) if not usual[0] <= v <= usual[1]]
    return f"{beyond:,} value{'s' if beyond > 1 else ''} beyond, up to {ends[-1]}: not shown"


def _log_note(curves: Sequence[Curve]) -> str:
    hidden = sum(int((np.isfinite(c.values) & (c.values <= 0)).sum()) for c in curves)
    if not hidden:
        return ""
    return f"{hidden:,} value{'s' if hidden > 1 else ''} <= 0: not on a log axis"


def _note(text: str, theme: Theme) -> dict[str, Any]:
    return {
        "text": inert(text),
        "x": 0,
        "y": 0,
        "xref": "paper",
        "yref": "paper",
        "xanchor": "left",
        "yanchor": "bottom",
        "xshift": 4,
        "showarrow": False,
        "font": {"size": 11, "color": theme.muted},
    }


def _summary(
    metric: str, curves: Sequence[Curve], broken: Sequence[Episode], named: Sequence[int]
) -> str:
    low, high = _span(curves)
    if not any(c.steps.size for c in curves):
        return f"{metric}: no values yet"
    last = [float(v[-1]) for c in curves if (v := c.values[np.isfinite(c.values)]).size]
    parts = [f"{metric} of {len(curves)} ranks, steps {low:.0f} to {high:.0f}"]
    if last:
        parts.append(f"last values {number(min(last))} to {number(max(last))}")
    if broken:
        parts.append(broken[0].text() + (f" and {len(broken) - 1} more" if broken[1:] else ""))
    if named:
        parts.append(f"highlighted: rank {rank_list(named)}")
    return "; ".join(parts)
