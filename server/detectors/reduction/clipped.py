"""Ranks that clip their own gradients before these are reduced. Pure.

A gradient of norm n that is clipped to c counts min(1, c / n) times in the mean: so its weight
times its norm is c, the same number for every rank that is clipped, and at every step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.server.window import Reduction, Window

# Relative difference up to which limits are one: `clip_grad_norm_` adds 1e-6 to the norm, norms of
# 16 bits have 3 digits.
_SAME = 0.01
# A weight that is less by this much is not that of an unclipped rank; nor are norms that differ by
# less different ones.
_LESS = 0.02


@dataclass(slots=True)
class Limit:
    """One limit, as it was seen at consecutive samples.

    Attributes:
        norm: that gradients are clipped to.
        since: first of these samples.
        count: number of them.
    """

    norm: float
    since: int
    count: int = 1


@dataclass(slots=True)
class ClippedBefore:
    """Follows whether weights are explained by a limit."""

    known: Limit | None = None

    def take(self, window: Window, made: Reduction) -> Limit | None:
        """The limit that explains the ranks' weights in a reduction; None for none."""
        limit = _limit(window, made, alike=self.known is not None)
        if limit is None:
            self.known = None
        elif self.known is not None and abs(limit / self.known.norm - 1.0) < _SAME:
            self.known.count += 1
        else:
            self.known = Limit(limit, made.step)
        return self.known


def _limit(window: Window, made: Reduction, *, alike: bool) -> float | None:
    """Args: alike: also where the ranks' norms are too much alike to show it by themselves."""
    norms = window.series.get("grad_norm_local")
    if norms is None:
        return None
    column = int(np.searchsorted(window.steps, made.step))
    rows = np.flatnonzero(np.isin(window.ranks, made.ranks) & norms.present[:, column])
    if len(rows) != len(made.ranks):
        return None
    local = norms.values[rows, column]
    one = made.pattern != "weights"
    times = np.full(len(local), made.ratio) if one else np.array(made.weights) * len(local)
    if not (np.isfinite(local) & (local > 0) & (times > 0)).all():
        return None
    clipped = times < 1.0 - _LESS
    # Of one rank alone any weight is explained.
    shown = clipped.sum() > 1 and np.ptp(np.log(local[clipped])) > _LESS
    if not clipped.any() or not (alike or shown):
        return None
    limits = (times * local)[clipped]
    limit = float(np.median(limits))
    if (np.abs(limits / limit - 1.0) > _SAME).any():
        return None
    whole = ~clipped
    if (np.abs(times[whole] - 1.0) > _LESS).any() or (local[whole] > limit * (1 + _LESS)).any():
        return None
    return limit
