"""First steps that wrote over the initialisation, of which the training has not recovered."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.mechanisms.beginning import FIRST, LATEST, RISE, Beginning
from rankscope.server.detectors.mechanisms.series_by_step import median

# First updates whose median is taken: a rate that is too high shows at once, with every optimizer;
# and those by which it is seen that it does not pass.
_UPDATES, _MORE = 10, 50
# Share of the deviance explained, up to which nothing is known of the targets yet: of 67 healthy
# trainings whose answers were known none with such a start explained so little after 100 losses.
_NOTHING = 0.05
# The same where large updates last: of 40 healthy trainings with a median of 0.02 or more over the
# first 50 steps the least had explained 0.4 by then.
_LITTLE = 0.1
# Median gain of the layers, at the least: weights that begin far smaller grow by large steps; where
# it is not known, what their norm may have grown by.
_GAIN, _GROWN = 0.1, 2.0
# And more than this, over ten losses, at no time before: what was learned and is lost is another's
# fault.
_ONCE, _TEN = 0.15, 10


@dataclass(slots=True)
class BadStart:
    """Follows the first losses and updates, and what came of them.

    Attributes:
        rate: the largest of the first steps.
        updates: the first ones, relative to the parameters.
        games: another optimizer steps in turns with this one: answers of its opponent are worth no
            more the better both play.
        gain: of the weights before the first step, NaN where it is not known: beside weights that
            begin at zero every update is large.
        norms: of the parameters, at first and last.
        losses, explained: of all steps, and the latest; `best`: the most that ten of these had.
        thrown: the first steps threw the loss up.
        seen, last: the step at which it was found, and up to which it lasted; -1 where it was not.
    """

    rate: float = math.nan
    updates: list[float] = field(default_factory=list)
    games: bool = False
    gain: float = math.nan
    norms: tuple[float, float] = (math.nan, math.nan)
    losses: Beginning = field(default_factory=Beginning)
    explained: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))
    best: float = -math.inf
    seen: int = -1
    last: int = -1
    over: bool = False
    thrown: bool = False

    @property
    def written(self) -> float:
        """Median of the first updates; NaN where there are too few."""
        few = len(self.updates) < _UPDATES
        return math.nan if few else median(self.updates[:_UPDATES])

    @property
    def lasting(self) -> float:
        """The same of the first 50, or of those there are."""
        return math.nan if len(self.updates) < _UPDATES else median(self.updates)

    @property
    def began_at_zero(self) -> bool:
        """Whether the weights have their size from the first updates alone."""
        return self.gain == 0

    def take(self, step: int, row: dict[str, float], *, overwriting: float, large: float) -> None:
        """Takes a step's values.

        Args:
            overwriting: update, relative to the parameters, that writes over them.
            large: that is larger than any that healthy trainings have for long.
        """
        update = row.get("update_ratio", math.nan)
        if len(self.updates) < _MORE >= self.losses.count and math.isfinite(update):
            self.updates.append(update)
        if math.isnan(self.gain):
            self.gain = row.get("initial_gain", math.nan)
        if math.isfinite(norm := row.get("weight_norm", math.nan)):
            self.norms = (norm if math.isnan(self.norms[0]) else self.norms[0], norm)
        explained, loss = (row.get(n, math.nan) for n in ("explained_deviance", "loss"))
        if math.isfinite(explained):
            self.explained.append(explained)
            if not self.over and len(self.explained) >= _TEN:
                self.best = max(self.best, float(np.mean(list(self.explained)[-_TEN:])))
        if not math.isfinite(loss):
            return
        losses = self.losses
        if losses.count < FIRST:
            self.rate = max((self.rate, row.get("lr", math.nan)), key=_or_least)
        losses.push(step, loss)
        if not losses.settled or self.over or not losses.first > 0:
            return
        self.thrown = self.written > overwriting and losses.highest > (1 + RISE) * losses.first
        if losses.begun_before or self.began_at_zero:
            self.over = True
        elif (self.thrown and not self._learns()) or (self.lasting > large and self._little()):
            self.seen = step if self.seen < 0 else self.seen
            self.last = step
        else:
            self.over = True

    @property
    def known(self) -> bool:
        """Whether it is known what the answers explain."""
        return len(self.explained) == LATEST

    def _learns(self) -> bool:
        """Whether the answers are worth something; where that is not known, the loss is lower."""
        if self.known:
            return float(np.mean(self.explained)) > _NOTHING
        return self.losses.now < self.losses.first

    def _little(self) -> bool:
        """Whether it is known that the answers are worth hardly more than one that is constant."""
        small = (
            self.norms[1] > _GROWN * self.norms[0] if math.isnan(self.gain) else self.gain < _GAIN
        )
        known = self.known and not self.games and self.best <= _ONCE and not small
        return known and float(np.mean(self.explained)) <= _LITTLE


def _or_least(rate: float) -> float:
    return rate if math.isfinite(rate) else -math.inf
