"""One metric of several runs on one chart: of each the mean over its ranks, and their range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from rankscope.dashboard.figures.arrays import Curve, Float64, Int64
from rankscope.dashboard.figures.outline import area, drawable
from rankscope.dashboard.figures.text import inert, number
from rankscope.dashboard.figures.theme import LIGHT, Theme, faded, layout
from rankscope.dashboard.figures.units import axis_title

_FEW_POINTS = 60
_DASHES = ("solid", "dash", "dot", "dashdot")


def run_curves(
    runs: Mapping[str, Sequence[Curve]],
    *,
    metric: str,
    theme: Theme = LIGHT,
    log_y: bool = False,
    marked_step: int | None = None,
) -> go.Figure:
    """A line for each run, dashed from the second on, within the range of its ranks.

    Args:
        runs: curves of the ranks, by the run's id.
        metric: name of the series; it gives the title of the y axis, with its unit.
        log_y: logarithmic y axis.
        marked_step: step at which the runs begin to differ, if it is known.

    Returns:
        A figure; `layout.meta.summary` says in a sentence what is on it.
    """
    colors = (theme.accent, theme.warning, theme.unsized, theme.critical)
    traces: list[dict[str, Any]] = []
    last = []
    for place, (run, curves) in enumerate(runs.items()):
        steps, mean, low, high = _over_ranks(curves)
        color = colors[place % len(colors)]
        if len(curves) > 1 or any(c.minimum is not None for c in curves):
            traces.append(_range(steps, low, high, color, log_y))
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(steps) <= _FEW_POINTS else "lines",
                "marker": {"size": 4},
                "x": steps,
                "y": drawable(mean, log_y),
                "name": inert(run, 60),
                "meta": {"run": run, "role": "raw"},
                "line": {"color": color, "width": 1.8, "dash": _DASHES[place % len(_DASHES)]},
                "hovertemplate": "%{y:.6g}",
            }
        )
        if len(mean):
            last.append(f"{run} {number(float(mean[-1]))}")
    settings = layout(theme)
    settings |= {
        "xaxis": {"title": {"text": "step"}, "tickformat": ",d"},
        "yaxis": {
            "title": {"text": inert(axis_title(metric), 60)},
            "type": "log" if log_y else "linear",
            "exponentformat": "e",
            "minexponent": 4,
            "fixedrange": True,
        },
        "hovermode": "x unified",
        "showlegend": True,
        "legend": {**settings["legend"], "orientation": "h", "y": 1.12, "x": 0},
        "margin": {"l": 60, "r": 16, "t": 36, "b": 42},
        "shapes": [] if marked_step is None else [_mark(marked_step, theme)],
        "meta": {"summary": f"{metric} of {len(runs)} runs; last values: {', '.join(last) or '-'}"},
    }
    return go.Figure(data=traces, layout=settings)


def _over_ranks(curves: Sequence[Curve]) -> tuple[Int64, Float64, Float64, Float64]:
    """Steps int64 [S] that most ranks have, and the mean, smallest and largest value there."""
    held = [c for c in curves if c.steps.size]
    if not held:
        empty = np.empty(0)
        return np.empty(0, np.int64), empty, empty, empty
    steps = np.concatenate([c.steps for c in held])
    unique, inverse, counts = np.unique(steps, return_inverse=True, return_counts=True)
    mean = np.zeros(len(unique))
    low, high = np.full(len(unique), np.inf), np.full(len(unique), -np.inf)
    with np.errstate(invalid="ignore"):
        np.add.at(mean, inverse, np.concatenate([c.values for c in held]))
        lows = [c.values if c.minimum is None else c.minimum for c in held]
        highs = [c.values if c.maximum is None else c.maximum for c in held]
        np.minimum.at(low, inverse, np.concatenate(lows))
        np.maximum.at(high, inverse, np.concatenate(highs))
    # Where a rank is missing its value would be missing in the mean: a jump that nobody trained.
    whole = counts == counts.max()
    return unique[whole], mean[whole] / counts[whole], low[whole], high[whole]


def _range(steps: Int64, low: Float64, high: Float64, color: str, log_y: bool) -> dict[str, Any]:
    return area(steps, low, high, log_y=log_y) | {"fillcolor": faded(color, 0.16)}


def _mark(step: int, theme: Theme) -> dict[str, Any]:
    return {
        "type": "line",
        "x0": step,
        "x1": step,
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "line": {"color": theme.critical, "width": 1.5, "dash": "dot"},
    }
