"""Whether as many answers are right as before the loss rose. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.statistics import BLOCK
from rankscope.server.detectors.walking import mean_by_step, noise_of_mean
from rankscope.server.window import Window

SERIES = "accuracy"
# Accuracies before and since a rise that are compared, and the standard errors up to which they are
# the same.
_COMPARED, _SAME = 2 * BLOCK, 2.0
# Rise of the accuracy before, since the first ones, without which it has nothing to lose: chance
# stays chance whatever the loss does.
_LEARNED = 0.1
# Accuracies that are remembered: a rise is dated back by some dozen blocks at most.
_REMEMBERED = 32 * BLOCK

CAUSE = (
    "As many answers are right as before: nothing that was learned is lost. The loss measures "
    "something else since then (another weight, another term, smoothed labels), or a few answers "
    "have become far more wrong."
)
REMEDY = "Nothing, if the loss was changed on purpose. Else compare its terms before and after."


@dataclass(slots=True)
class AnswersKept:
    """Follows the mean accuracy over the ranks.

    Attributes:
        first: accuracies of the first steps.
    """

    first: list[float] = field(default_factory=list)
    accuracies: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def take(self, window: Window) -> None:
        """Takes what was posted in a window."""
        posted = mean_by_step(window, SERIES).items()
        finite = [pair for pair in posted if math.isfinite(pair[1])]
        self.first += [value for _, value in finite[: BLOCK - len(self.first)]]
        self.accuracies.extend(finite)

    def since(self, step: int, until: int) -> bool | None:
        """Whether the accuracy from one step until another is that before; None for too few.

        The scatter is that of neighbouring differences.
        """
        before = [v for at, v in self.accuracies if at < step][-_COMPARED:]
        since = [v for at, v in self.accuracies if step <= at <= until]
        if len(before) < _COMPARED or len(since) < _COMPARED:
            return None
        known = float(np.mean(before))
        if known - float(np.mean(self.first)) < _LEARNED:
            return None
        lost = known - float(np.mean(since))
        return lost <= _SAME * math.hypot(noise_of_mean(before), noise_of_mean(since))
