"""Names at the end of the lines, so that a suspect rank needs no legend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rankscope.dashboard.figures.arrays import Curve, rank_list
from rankscope.dashboard.figures.outline import drawable

# Before the names of ranks that alerts name; it says the same without colour.
SUSPECT_SIGN = "\u25b2 "
# Labels closer than this part of the drawn range would cover each other: 15 of some 150 pixels.
_ROOM = 0.1
# Characters that fit into the margin beside the chart.
_FITS = 9


def end_labels(
    curves: Sequence[Curve], color: str, log_y: bool, *, sign: str = "", span: float = 0.0
) -> list[dict[str, Any]]:
    """An annotation at the last drawn point of each curve; near neighbours share one.

    A rank without any value that can be drawn (all NaN, say) is named at the top edge.

    Args:
        curves: those to name.
        color: of the text.
        log_y: whether the y axis is logarithmic; then positions are powers of ten.
        sign: before each name.
        span: what the axis shows at least, as the axis counts.
    """
    ends: list[tuple[float, int, int]] = []
    lost: list[Curve] = []
    drawn: list[float] = []
    for curve in curves:
        values = drawable(curve.values, log_y)
        there = np.flatnonzero(np.isfinite(values))
        if not there.size:
            lost += [curve] if curve.steps.size else []
            continue
        heights = np.log10(values[there]) if log_y else values[there]
        drawn += [float(heights.min()), float(heights.max())]
        ends.append((float(heights[-1]), int(curve.steps[there[-1]]), curve.rank))
    room = _ROOM * max((max(drawn) - min(drawn)) if drawn else 1.0, span)
    labels: list[dict[str, Any]] = []
    group: list[tuple[float, int, int]] = []
    for end in sorted(ends) + [(math.inf, 0, -1)]:
        if group and end[0] - group[0][0] > room:
            x = max(step for _, step, _ in group)
            y = sum(height for height, _, _ in group) / len(group)
            labels.append(_label(x, y, "y", [rank for _, _, rank in group], color, sign))
            group = []
        group.append(end)
    if lost:
        x = max(int(c.steps[-1]) for c in lost)
        labels.append(_label(x, 0.88, "paper", [c.rank for c in lost], color, sign))
    return labels


def _label(
    x: int, y: float, yref: str, ranks: Sequence[int], color: str, sign: str
) -> dict[str, Any]:
    return {
        "x": x,
        "xref": "x",
        "y": y,
        "yref": yref,
        "xanchor": "left",
        "xshift": 4,
        "showarrow": False,
        "align": "left",
        "text": sign + _named(ranks),
        "font": {"color": color, "size": 11},
    }


def _named(ranks: Sequence[int]) -> str:
    """In two lines, or their number, where the margin beside the chart has no room for more."""
    word, numbers = "ranks" if len(ranks) > 1 else "rank", rank_list(ranks)
    if len(word) + 1 + len(numbers) <= _FITS:
        return f"{word} {numbers}"
    return f"{word}<br>{numbers}" if len(numbers) <= _FITS else f"{len(ranks)} {word}"
