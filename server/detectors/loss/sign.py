"""Does a loss change its sign by nature, or was it negated? Pure.

A surrogate or a log-likelihood may have any sign, and its level says nothing. A loss that had been
positive throughout and is negative from one step to the next was negated, or a term of it was.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

# Positive values that establish that a loss is positive: as many as a spike is judged against.
ESTABLISHED = 32
# A loss that drifts through zero crosses it by its usual move from value to value. Of 32 such moves
# of a normal or Laplace-distributed noise none reaches 4 times the largest but with p < 1e-4.
_JUMP = 4.0


@dataclass(slots=True)
class LossSign:
    """Follows the sign of a loss, value by value.

    Attributes:
        natural: it changes its sign in its ordinary course.
        negated: the latest value is negative, and it was not by its ordinary course that it got
            there.
        flips: how many times a positive loss was negated.
        usual: the positive value before the latest of these.
    """

    natural: bool = False
    negated: bool = False
    flips: int = 0
    usual: float = np.nan
    _positive: int = 0
    _before: float = np.nan
    _moves: deque[float] = field(default_factory=lambda: deque(maxlen=2 * ESTABLISHED))

    def push(self, value: float) -> bool:
        """Takes the next finite value; returns whether the loss was negated with it."""
        if self.natural:
            return False
        if value >= 0:
            if not self.negated and self._positive:
                self._moves.append(abs(value - self._before))
            self._positive += 1
            self._before, self.negated = value, False
            return False
        if self.negated:
            return False
        jump = self._before - value
        if self._positive < ESTABLISHED or jump <= _JUMP * max(self._moves):
            self.natural = True
            return False
        self.negated, self.usual = True, self._before
        self.flips += 1
        return True
