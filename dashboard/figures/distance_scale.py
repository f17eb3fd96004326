"""The colours of a distance: equal, differing by so much, by an unknown amount, not checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from rankscope.dashboard.figures.arrays import Bool, Float64
from rankscope.dashboard.figures.theme import Theme

# Relative distances of a single flipped last bit up to those of unrelated models.
_DEFAULT_DECADES = (-8.0, 0.0)
# Where `legend_traces` stand: a click on the key of a colour would hide cells.
KEY_ABOVE: Mapping[str, Any] = {
    "orientation": "h",
    "x": 0,
    "y": 1,
    "yanchor": "bottom",
    "itemclick": False,
    "itemdoubleclick": False,
}


def cell_traces(
    *,
    equal: Bool,
    distance: Float64,
    unsized: Bool,
    theme: Theme,
    title: str,
    decades: tuple[float, float] | None = None,
    common: dict[str, Any],
    hover: tuple[str, str, str],
) -> list[dict[str, Any]]:
    """Three heatmaps over each other, each with cells of its own; what none covers is unchecked.

    One colour scale could not keep an exact zero apart from a tiny distance.

    Args:
        equal: bool [A, B].
        distance: float64 [A, B]; NaN where the other two speak.
        unsized: bool [A, B]: differs, nobody knows how far.
        theme: colours.
        title: of the colour bar.
        decades: log10 of the smallest and largest colour; default: those of the data, widened.
        common: what all three share (x, y, gaps, axes).
        hover: templates for equal, distant and unsized cells.
    """
    layers: list[dict[str, Any]] = []
    for cells, color, text, role in (
        (equal, theme.equal, hover[0], "equal"),
        (unsized, theme.unsized, hover[2], "unsized"),
    ):
        if not cells.any():
            continue
        layers.append(
            {
                "type": "heatmap",
                **common,
                # Half the bytes: colours and texts need no more digits than single precision has.
                "z": np.where(cells, 1.0, np.nan).astype(np.float32),
                "zmin": 0,
                "zmax": 1,
                "colorscale": [[0, color], [1, color]],
                "showscale": False,
                "hovertemplate": text + "<extra></extra>",
                "hoverongaps": False,
                "meta": {"role": role},
            }
        )
    sized = np.isfinite(distance) & (distance > 0)
    if sized.any():
        logs = np.log10(np.where(sized, distance, 1.0))
        low, high = decades or decades_of(distance)
        count = len(theme.differing) - 1
        layers.append(
            {
                "type": "heatmap",
                **common,
                "z": np.where(sized, logs, np.nan).astype(np.float32),
                "customdata": np.where(sized, distance, np.nan).astype(np.float32),
                "zmin": low,
                "zmax": high,
                "colorscale": [[i / count, c] for i, c in enumerate(theme.differing)],
                "hovertemplate": hover[1] + "<extra></extra>",
                "hoverongaps": False,
                "meta": {"role": "distance"},
                "colorbar": _colorbar(title, low, high, theme),
            }
        )
    return layers


def decades_of(distance: Float64) -> tuple[float, float]:
    """Whole powers of ten that hold all positive distances, at least two of them."""
    there = distance[np.isfinite(distance) & (distance > 0)]
    if not there.size:
        return _DEFAULT_DECADES
    low, high = math.floor(math.log10(there.min())), math.ceil(math.log10(there.max()))
    return (float(low), float(max(high, low + 2)))


def legend_traces(
    theme: Theme, *, equal: bool, differs: bool, unsized: bool, unchecked: bool
) -> list[dict[str, Any]]:
    """Entries of the legend for the cells that occur; heatmaps have none of their own."""
    entries = (
        (equal, "equal to the last bit", theme.equal, "square"),
        (differs, "differs, colour = distance", theme.differing[2], "square"),
        (unsized, "differs, distance not sampled", theme.unsized, "square"),
        (unchecked, "not checked", theme.unchecked, "square-open"),
    )
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [None],
            "y": [None],
            "name": name,
            "showlegend": True,
            "hoverinfo": "skip",
            "marker": {
                "symbol": symbol,
                "size": 11,
                "color": theme.muted if symbol == "square-open" else color,
                "line": {"width": 1, "color": theme.muted},
            },
            "meta": {"role": "legend"},
        }
        for there, name, color, symbol in entries
        if there
    ]


def _colorbar(title: str, low: float, high: float, theme: Theme) -> dict[str, Any]:
    step = max(1, math.ceil((high - low) / 5))
    ticks = list(range(int(low), int(high) + 1, step))
    return {
        "title": {"text": title, "side": "right", "font": {"size": 11, "color": theme.muted}},
        "tickvals": ticks,
        "ticktext": [f"1e{t}" if t else "1" for t in ticks],
        "tickfont": {"size": 10, "color": theme.muted},
        "thickness": 10,
        "outlinewidth": 0,
        "len": 1,
        "y": 0.5,
        "xpad": 6,
    }
