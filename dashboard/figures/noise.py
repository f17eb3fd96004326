"""How much of the gradient is noise, over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from rankscope.dashboard.figures.arrays import Float64, Int64, Mark
from rankscope.dashboard.figures.marks import mark_layout, with_marks
from rankscope.dashboard.figures.text import number
from rankscope.dashboard.figures.theme import LIGHT, Theme, layout

# A point a pixel and more of a wide chart.
_MOST_POINTS = 600


def gradient_noise(
    steps: Int64,
    scale: Float64,
    batch: Float64,
    *,
    counted: bool,
    theme: Theme = LIGHT,
    marks: Sequence[Mark] = (),
    x_range: tuple[float, float] | None = None,
) -> go.Figure:
    """The gradient noise scale beside the batch, on one logarithmic axis.

    Args:
        steps: int64 [S], ascending, at least one.
        scale: float64 [S], samples; what is not finite is a gap.
        batch: float64 [S], samples of all ranks.
        counted: whether samples are reported; else the batch of one rank counts as one.
        theme: colours.
        marks: alerts.
        x_range: first and last step that the axis shows; default: those of the data.

    Returns:
        A figure; `layout.meta.summary` says the last values and what they mean in a sentence.
    """
    every = -(-len(steps) // _MOST_POINTS)
    # The last one is always there.
    kept = np.arange(len(steps) - 1, -1, -every)[::-1]
    steps, scale, batch = steps[kept], scale[kept], batch[kept]
    drawn = np.where(np.isfinite(scale) & (scale > 0), scale, np.nan)
    unit = "samples" if counted else "batches of a rank"
    span = x_range or with_marks((float(steps[0]), float(steps[-1])), marks)
    shapes, labels = mark_layout(marks, theme, span)
    settings = layout(theme) | {
        "xaxis": {"title": {"text": "step"}, "tickformat": ",d", "range": list(span)},
        "yaxis": {
            "title": {"text": unit},
            "type": "log",
            "exponentformat": "e",
            # At 1, 2 and 5 of each decade: numbers at each digit stand on each other.
            "dtick": "D2",
            "fixedrange": True,
        },
        "hovermode": "x unified",
        "dragmode": "zoom",
        "showlegend": True,
        "shapes": shapes,
        "annotations": labels,
        "margin": {"l": 60, "r": 16, "t": 36, "b": 42},
        "meta": {"summary": _summary(steps, drawn, batch, unit)},
    }
    settings["legend"] = settings["legend"] | {
        "orientation": "h", "x": 0, "y": 1, "yanchor": "bottom",
    }  # fmt: skip
    return go.Figure(
        data=[
            _line(steps, drawn, "noise scale", theme.accent, "solid"),
            _line(steps, batch, "batch", theme.muted, "dash"),
        ],
        layout=settings,
    )


def _line(steps: Int64, values: Float64, name: str, color: str, dash: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": steps,
        "y": values,
        "name": name,
        "line": {"color": color, "width": 1.8, "dash": dash},
        "hovertemplate": "%{y:,.4g}",
        "meta": {"role": "raw"},
    }


def _summary(steps: Int64, scale: Float64, batch: Float64, unit: str) -> str:
    known = np.flatnonzero(np.isfinite(scale))
    if not known.size:
        return "No step has a gradient noise scale"
    last = int(known[-1])
    factor = scale[last] / batch[last]
    meaning = (
        f"a step is mostly noise, and {number(factor)} times the batch would be half signal"
        if factor > 1
        else f"a batch {number(1 / factor)} times smaller would still be half signal"
    )
    return (
        f"Noise scale {number(scale[last])} {unit} at step {int(steps[last]):,}, "
        f"batch {number(batch[last])}: {meaning}"
    )
