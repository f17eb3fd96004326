"""First steps that wrote over the initialisation, of which the training has not recovered."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.beginning import FIRST, LATEST, RISE, Beginning
from rankscope.server.detectors.walking import median

# First updates whose median is taken: a rate that is too high shows at once, with every optimizer.
_UPDATES = 10
# Share of the deviance explained, up to which nothing is known of the targets yet: of 67 healthy
# trainings whose answers were known none with such a start explained so little after 100 losses.
_NOTHING = 0.05


@dataclass(slots=True)
class BadStart:
    """Follows the first losses and updates, and what came of them.

    Attributes:
        rate: the largest of the first steps.
        updates: the first ones, relative to the parameters.
        gain: of the weights before the first step, NaN where it is not known: beside weights that
            begin at zero every update is large.
        losses, explained: of all steps, and the latest.
        seen, last: the step at which it was found, and up to which it lasted; -1 where it was not.
    """

    rate: float = math.nan
    updates: list[float] = field(default_factory=list)
    gain: float = math.nan
    losses: Beginning = field(default_factory=Beginning)
    explained: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))
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
        losses = self.losses
        if losses.count < FIRST:
            self.rate = max((self.rate, row.get("lr", math.nan)), key=_or_least)
        losses.push(step, loss)
        if not losses.settled or self.over or not losses.first > 0:
            return
        if self.seen < 0 and (self.began_at_zero or not self.written > overwriting):
            self.over = True
        elif losses.begun_before:
            self.over = True
        elif losses.highest <= (1 + RISE) * losses.first or self._learns():
            self.over = True
        else:
            self.seen = step if self.seen < 0 else self.seen
            self.last = step

    @property
    def known(self) -> bool:
        """Whether it is known what the answers explain."""
        return len(self.explained) == LATEST

    def _learns(self) -> bool:
        """Whether the answers are worth something; where that is not known, the loss is lower."""
        if self.known:
            return float(np.mean(self.explained)) > _NOTHING
        return self.losses.now < self.losses.first


def _or_least(rate: float) -> float:
    return rate if math.isfinite(rate) else -math.inf
