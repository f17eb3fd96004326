"""Alerts on the step axis of any figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rankscope.dashboard.figures.arrays import Mark
from rankscope.dashboard.figures.text import inert
from rankscope.dashboard.figures.theme import Theme, faded

_ORDER = {"critical": 0, "warning": 1, "info": 2}
_SYMBOLS = {"critical": "\u25b2", "warning": "\u25c6", "info": "\u25cf"}
MAX_MARKS = 24


def mark_layout(
    marks: Sequence[Mark], theme: Theme, span: tuple[float, float]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Shapes and annotations of the gravest `MAX_MARKS` alerts within the shown steps.

    The shape of the symbol, not its colour alone, shows the severity. A symbol that would cover
    another one is left out; its line stays.

    Args:
        marks: the alerts.
        theme: colours.
        span: first and last step that the axis shows.
    """
    low, high = span
    width = max(high - low, 1.0)
    shapes: list[dict[str, Any]] = []
    labels: list[dict[str, Any]] = []
    taken: list[float] = []
    shown = [m for m in marks if low <= m.first_step <= high or _covers(m, low, high)]
    for mark in sorted(shown, key=lambda m: (_ORDER.get(m.severity, 3), m.first_step))[:MAX_MARKS]:
        color = theme.severity(mark.severity)
        if mark.last_step is not None and mark.last_step > mark.first_step:
            shapes.append(
                {
                    "type": "rect",
                    "xref": "x",
                    "yref": "paper",
                    "x0": max(mark.first_step, low),
                    "x1": min(mark.last_step, high),
                    "y0": 0,
                    "y1": 1,
                    "line": {"width": 0},
                    "fillcolor": faded(color, 0.05),
                    "layer": "below",
                }
            )
        if not low <= mark.first_step <= high:
            continue
        shapes.append(
            {
                "type": "line",
                "xref": "x",
                "yref": "paper",
                "x0": mark.first_step,
                "x1": mark.first_step,
                "y0": 0,
                "y1": 1,
                "line": {"color": color, "width": 1.2, "dash": "dash"},
            }
        )
        if any(abs(mark.first_step - other) < 0.03 * width for other in taken):
            continue
        taken.append(mark.first_step)
        labels.append(
            {
                "name": mark.id,
                "x": mark.first_step,
                "xref": "x",
                "y": 1,
                "yref": "paper",
                "yanchor": "bottom",
                "showarrow": False,
                "text": _SYMBOLS.get(mark.severity, _SYMBOLS["info"]),
                "font": {"color": color, "size": 12},
                "hovertext": f"{inert(mark.severity)}, step {mark.first_step}: {inert(mark.title)}",
                "captureevents": True,
            }
        )
    return shapes, labels


def with_marks(span: tuple[float, float], marks: Sequence[Mark]) -> tuple[float, float]:
    """The span, a little longer where an alert begins just behind it.

    A rank that dies is missed at the step after the last one: the mark must not lie outside.
    """
    low, high = span
    room = max(1.0, 0.02 * (high - low))
    just_after = [m.first_step for m in marks if high < m.first_step <= high + room]
    return low, float(max([high, *just_after]))


def _covers(mark: Mark, low: float, high: float) -> bool:
    return mark.first_step < low and mark.last_step is not None and mark.last_step >= low
