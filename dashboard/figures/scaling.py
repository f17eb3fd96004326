"""How much of its throughput a rank keeps when there are more of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from rankscope.dashboard.figures.text import inert
from rankscope.dashboard.figures.theme import LIGHT, Theme, layout

# The axis ends a little above one: more is seen where it occurs.
_ROOM = 1.05


@dataclass(frozen=True, slots=True)
class Scaled:
    """A run with some number of ranks.

    Attributes:
        rate: samples a second and rank.
    """

    run: str
    ranks: int
    rate: float


def scaling_efficiency(runs: Sequence[Scaled], *, theme: Theme = LIGHT) -> go.Figure:
    """Throughput per rank over that of the run with the fewest ranks, by number of ranks.

    1 is a rank that gets as much done among many as among few; the line at 1 is what perfect
    scaling would be.

    Args:
        runs: of one training, by number of ranks, ascending; two at least.
        theme: colours.

    Returns:
        A figure with a point for each run; `layout.meta` has a `summary` of the last one.
    """
    ranks = np.array([one.ranks for one in runs])
    rates = np.array([one.rate for one in runs])
    efficiency = rates / rates[0]
    settings = layout(theme)
    settings |= {
        "xaxis": {
            "title": {"text": "ranks"},
            "type": "log",
            "tickvals": ranks,
            "ticktext": [f"{n:,}" for n in ranks],
            "range": [float(np.log10(ranks[0])) - 0.1, float(np.log10(ranks[-1])) + 0.1],
            "fixedrange": True,
        },
        "yaxis": {
            "title": {"text": "throughput per rank"},
            "tickformat": ".0%",
            "range": [0, _ROOM * float(max(1.0, efficiency.max()))],
            "fixedrange": True,
        },
        "dragmode": False,
        "hovermode": "closest",
        "showlegend": False,
        "margin": {"l": 60, "r": 16, "t": 16, "b": 42},
        "shapes": [
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": 1,
                "y1": 1,
                "line": {"color": theme.muted, "width": 1, "dash": "dot"},
            }
        ],
    }
    fewest, own = runs[0], runs[-1]
    settings["meta"] = {
        "summary": f"{_rate(own)} a second and rank on {own.ranks:,} ranks, "
        f"{efficiency[-1]:.0%} of the {_rate(fewest)} on {fewest.ranks:,} (run {fewest.run})"
    }
    trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": ranks,
        "y": efficiency,
        "marker": {"size": 8},
        "line": {"color": theme.accent, "width": 1.8},
        "customdata": [f"{inert(one.run)}: {_rate(one)} a second and rank" for one in runs],
        "hovertemplate": "%{x:,} ranks: %{y:.1%}<br>%{customdata}<extra></extra>",
        "meta": {"role": "raw"},
    }
    return go.Figure(data=[trace], layout=settings)


def _rate(one: Scaled) -> str:
    return f"{one.rate:,.0f} samples" if one.rate >= 100 else f"{one.rate:.3g} samples"
