"""NaN and infinities on a chart: marks at its top edge, because a gap is easily overlooked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankscope.dashboard.figures.arrays import Curve, rank_list
from rankscope.dashboard.figures.theme import Theme

_SYMBOLS = {"NaN": "x", "Infinity": "triangle-up", "-Infinity": "triangle-down"}
MAX_EPISODES = 200


@dataclass(frozen=True, slots=True)
class Episode:
    """Consecutive points of some ranks that are not finite.

    Attributes:
        kind: `NaN`, `Infinity` or `-Infinity`.
        count: number of points, of one rank.
    """

    kind: str
    first_step: int
    last_step: int
    count: int
    ranks: tuple[int, ...]

    def text(self) -> str:
        """`NaN at step 120, rank 2` or `NaN from step 120 to 300, ranks 0-3`."""
        when = (
            f"at step {self.first_step}"
            if self.count == 1
            else f"from step {self.first_step} to {self.last_step}"
        )
        whom = f"rank{'s' if len(self.ranks) > 1 else ''} {rank_list(self.ranks)}"
        return f"{self.kind} {when}, {whom}"


def episodes(curves: Sequence[Curve]) -> list[Episode]:
    """All stretches of non-finite values, equal ones of several ranks together, by first step."""
    found: dict[tuple[str, int, int, int], list[int]] = {}
    for curve in curves:
        there = np.isfinite(curve.values)
        if there.all():
            continue
        bad = np.flatnonzero(~there)
        start = 0
        for i, place in enumerate(bad):
            kind = _kind(float(curve.values[place]))
            follows = (
                i + 1 < len(bad)
                and bad[i + 1] == place + 1
                and _kind(float(curve.values[bad[i + 1]])) == kind
            )
            if not follows:
                first, last = int(curve.steps[bad[start]]), int(curve.steps[place])
                found.setdefault((kind, first, last, i + 1 - start), []).append(curve.rank)
                start = i + 1
    together = [
        Episode(kind, first, last, count, tuple(ranks))
        for (kind, first, last, count), ranks in found.items()
    ]
    return sorted(together, key=lambda e: (e.first_step, e.kind, e.ranks))


def nonfinite_trace(found: Sequence[Episode], theme: Theme) -> dict[str, Any]:
    """A scatter trace on the second y axis (0 to 1, fixed): one symbol each, a line along each.

    The first `MAX_EPISODES` are drawn; a series that flickers more often is one long mark anyway.
    """
    steps: list[int | None] = []
    symbols: list[str] = []
    texts: list[str] = []
    for episode in found[:MAX_EPISODES]:
        # The missing point between two episodes keeps their lines apart.
        steps += [episode.first_step, episode.last_step, None]
        symbols += [_SYMBOLS[episode.kind]] * 3
        texts += [episode.text()] * 3
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": steps,
        "y": [0.965] * len(steps),
        "yaxis": "y2",
        "name": "not finite",
        "line": {"color": theme.critical, "width": 2},
        "marker": {"symbol": symbols, "size": 9, "color": theme.critical},
        "text": texts,
        "hovertemplate": "%{text}<extra></extra>",
        "showlegend": False,
        "cliponaxis": False,
    }


def _kind(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
