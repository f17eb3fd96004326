"""What both detectors say of a run's baselines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rankscope.server.detectors.mechanisms.wording import count, listing, number
from rankscope.server.window import Baselines

# Settings, and characters of each value, that a sentence has.
_SETTINGS, _LONGEST = 5, 40


def compared_with(runs: Sequence[str]) -> str:
    """`3 baselines (a, b and c)`."""
    return f"{count(len(runs), 'baseline')} ({listing(list(runs), most=3)})"


def beside(values: Sequence[float]) -> str:
    """The range of some values."""
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low} to {high}"


def differences(baselines: Baselines) -> str:
    """In which settings a run differs from the nearest of its baselines: a sentence."""
    nearest = baselines.runs[0]
    # Those that were chosen come first, and of the others the order is that of the page.
    found = sorted(baselines.differing, key=lambda s: s.key not in baselines.unlike)
    if not found:
        return f"It has the same settings as {nearest}."
    texts = [f"{s.key} {_text(s.own)} (there {_text(s.theirs)})" for s in found[:_SETTINGS]]
    more = f" and {count(len(found) - _SETTINGS, 'more')}" if len(found) > _SETTINGS else ""
    if baselines.unlike:
        return f"Beside {nearest}, settings differ: {', '.join(texts)}{more}."
    return (
        f"No setting of the training differs from that of {nearest}; what else does: "
        f"{', '.join(texts)}{more}."
    )


def _text(value: Any) -> str:
    if value is None:
        return "none"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
