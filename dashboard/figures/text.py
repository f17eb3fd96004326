"""Text that came from outside, made harmless for plotly."""

from __future__ import annotations

import html
import math


def inert(text: str, limit: int = 120) -> str:
    """Plotly reads a part of HTML in names and titles; a metric may be called `<b>`, or worse."""
    shown = text if len(text) <= limit else text[: limit - 1] + "..."
    return html.escape(shown, quote=False)


def number(value: float) -> str:
    """A number as it is read aloud: four digits, and NaN by name."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return f"{value:.4g}"
