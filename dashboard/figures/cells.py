"""Cells in the colours of one continuous scale, zeros and what is no number in others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankscope.dashboard.figures.arrays import Bool, Float64, Int64
from rankscope.dashboard.figures.text import inert, number
from rankscope.dashboard.figures.theme import Theme, rank_colors

_COLORS = 12
# Percentiles that bound the scale: beyond, a few spikes would leave all else in one colour.
_ROBUST = (1.0, 99.0)
# Decades of a logarithmic scale: fewer would show noise as structure, more would hide structure.
_FEWEST, _MOST = 1.0, 12.0
# Texts of more cells would be megabytes.
_MOST_TEXTS = 20_000


@dataclass(frozen=True, slots=True)
class Scale:
    """Which colour stands for which value.

    Attributes:
        log: whether colours follow the logarithm to base 10.
        low, high: ends of the scale, of that logarithm where it is used; what lies beyond has the
            colour of the end.
    """

    log: bool
    low: float
    high: float


def scale_of(values: Float64, *, log: bool, robust: bool = True) -> Scale:
    """A scale that holds nearly all of the values (all, where not `robust`).

    A logarithmic one leaves out what is not positive.
    """
    there = values[np.isfinite(values)]
    if log:
        there = np.log10(there[there > 0])
    if not there.size:
        return Scale(log, 0.0, 1.0)
    low, high = np.percentile(there, _ROBUST).tolist() if robust else (there.min(), there.max())
    if log:
        high = max(high, low + _FEWEST)
        low = max(low, high - _MOST)
    elif not high > low:
        room = 0.5 * abs(low) or 0.5
        low, high = low - room, high + room
    return Scale(log, float(low), float(high))


def value_traces(
    values: Float64,
    there: Bool,
    *,
    steps: Int64,
    rows: Sequence[str],
    scale: Scale,
    theme: Theme,
    title: str,
) -> list[dict[str, Any]]:
    """Heatmaps over each other, each with cells of its own; what none covers has no value.

    Roles, in `meta`: `value`; `zero` on a logarithmic scale, for values of 0 or less; `nonfinite`.

    Args:
        values: float64 [A, B].
        there: bool [A, B]: whether a cell has a value, which may be NaN.
        steps: int64 [B].
        rows: names of the rows, [A], as they may stand in markup.
        title: of the colour bar.
    """
    text = np.char.add(np.array(rows)[:, None], np.array([f"<br>step {s}" for s in steps]))
    few = text.size <= _MOST_TEXTS
    where = "%{text}" if few else "row %{y}, step %{x}"
    common: dict[str, Any] = {
        "x": steps,
        "y": np.arange(len(rows)),
        "xgap": 1 if len(steps) <= 60 else 0,
        "ygap": 1 if len(rows) <= 64 else 0,
    }
    if few:
        common["text"] = text
    finite = there & np.isfinite(values)
    zero = finite & (values <= 0) if scale.log else np.zeros_like(finite)
    shown = finite & ~zero
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.log10(values) if scale.log else values
    colors = rank_colors(_COLORS, theme)
    traces: list[dict[str, Any]] = []
    if shown.any():
        traces.append(
            {
                "type": "heatmap",
                **common,
                "z": np.where(shown, z, np.nan).astype(np.float32),
                "customdata": np.where(shown, values, np.nan).astype(np.float32),
                "zmin": scale.low,
                "zmax": scale.high,
                "colorscale": [[i / (_COLORS - 1), c] for i, c in enumerate(colors)],
                "hovertemplate": where + "<br>%{customdata:.4g}<extra></extra>",
                "hoverongaps": False,
                "meta": {"role": "value"},
                "colorbar": _colorbar(title, scale, theme),
            }
        )
    strange = there & ~np.isfinite(values)
    for cells, color, role, said in (
        (zero, theme.unsized, "zero", "0"),
        (strange, theme.critical, "nonfinite", "not finite"),
    ):
        if cells.any():
            traces.append(
                {
                    "type": "heatmap",
                    **common,
                    "z": np.where(cells, 1.0, np.nan).astype(np.float32),
                    "zmin": 0,
                    "zmax": 1,
                    "colorscale": [[0, color], [1, color]],
                    "showscale": False,
                    "hovertemplate": f"{where}<br>{said}<extra></extra>",
                    "hoverongaps": False,
                    "meta": {"role": role},
                }
            )
    return traces


def nothing(text: str, theme: Theme) -> dict[str, Any]:
    """What stands in the middle of a chart without cells."""
    return {
        "x": 0.5,
        "y": 0.5,
        "xref": "paper",
        "yref": "paper",
        "showarrow": False,
        "text": inert(text),
        "font": {"size": 12, "color": theme.muted},
    }


def _colorbar(title: str, scale: Scale, theme: Theme) -> dict[str, Any]:
    bar: dict[str, Any] = {
        "title": {"text": title, "side": "right", "font": {"size": 11, "color": theme.muted}},
        "tickfont": {"size": 10, "color": theme.muted},
        "thickness": 10,
        "outlinewidth": 0,
        "len": 1,
        "y": 0.5,
        "xpad": 6,
    }
    if not scale.log:
        return bar | {"exponentformat": "e", "nticks": 6}
    first, last = math.ceil(scale.low), math.floor(scale.high)
    if last - first < 1:
        ticks = np.linspace(scale.low, scale.high, 4).tolist()
        return bar | {"tickvals": ticks, "ticktext": [f"{10**t:.2g}" for t in ticks]}
    step = max(1, math.ceil((last - first) / 5))
    whole = list(range(first, last + 1, step))
    return bar | {
        "tickvals": whole,
        "ticktext": [number(10.0**t) if -3 <= t <= 3 else f"1e{t}" for t in whole],
    }
