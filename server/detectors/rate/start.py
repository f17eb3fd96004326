"""First steps that wrote over the initialisation, of which the training has not recovered."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.walking import median

# First updates whose median is taken, and first losses of which the highest is: a rate that is too
# high shows at once, with every optimizer.
_UPDATES, _LOSSES = 10, 20
# How far above the first loss the highest of these is, as a share of it, where steps threw the
# parameters away: single batches of 16 and more differ by less.
_RISE = 0.5
# Losses before it is judged, and the latest of these that are averaged: of 67 healthy trainings
# whose answers were known none with such a start explained so little then.
_PATIENCE, _LATEST = 100, 30
# Share of the deviance explained, up to which nothing is known of the targets yet.
_NOTHING = 0.05


@dataclass(slots=True)
class BadStart:
    """Follows the first losses and updates, and what came of them.

    Attributes:
        written: median update of the first steps, relative to the parameters.
        rate: the largest of the first steps.
        first, highest: the first loss, and the highest of the first ones.
        gain: of the weights before the first step, NaN where it is not known: beside weights that
            begin at zero every update is large.
        losses, explained: the latest.
        seen, last: the step at which it was found, and up to which it lasted; -1 where it was not.
    """

    first_step: int = -1
    rate: float = math.nan
    updates: list[float] = field(default_factory=list)
    gain: float = math.nan
    first: float = math.nan
    highest: float = -math.inf
    count: int = 0
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST))
    explained: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST))
    seen: int = -1
    last: int = -1
    over: bool = False

    @property
    def written(self) -> float:
        """Median of the first updates; NaN where there are too few."""
        return median(self.updates) if len(self.updates) == _UPDATES else math.nan

    @property
    def began_at_zero(self) -> bool:
        """Whether the weights have their size from the first updates alone."""
        return self.gain == 0

    def take(self, step: int, row: dict[str, float], overwriting: float) -> None:
        """Takes a step's values.

        Args:
            overwriting: update, relative to the parameters, that writes over them.
        """
        update = row.get("update_ratio", math.nan)
        if len(self.updates) < _UPDATES and math.isfinite(update):
            self.updates.append(update)
        if math.isnan(self.gain):
            self.gain = row.get("initial_gain", math.nan)
        explained, loss = (row.get(n, math.nan) for n in ("explained_deviance", "loss"))
        if math.isfinite(explained):
            self.explained.append(explained)
        if not math.isfinite(loss):
            return
        if not self.count:
            self.first_step, self.first = step, loss
        if self.count < _LOSSES:
            self.highest = max(self.highest, loss)
            self.rate = max((self.rate, row.get("lr", math.nan)), key=_or_least)
        self.count += 1
        self.losses.append(loss)
        if self.count < _PATIENCE or self.over or not self.first > 0:
            return
        if self.seen < 0 and (self.began_at_zero or not self.written > overwriting):
            self.over = True
        elif self.first_step > 0:
            self.over = True  # it goes on from what was trained before
        elif self.highest <= (1 + _RISE) * self.first or self._learns():
            self.over = True
        else:
            self.seen = step if self.seen < 0 else self.seen
            self.last = step

    @property
    def known(self) -> bool:
        """Whether it is known what the answers explain."""
        return len(self.explained) == _LATEST

    def _learns(self) -> bool:
        """Whether the answers are worth something; where that is not known, the loss is lower."""
        if self.known:
            return float(np.mean(self.explained)) > _NOTHING
        return float(np.mean(self.losses)) < self.first


def _or_least(rate: float) -> float:
    return rate if math.isfinite(rate) else -math.inf
