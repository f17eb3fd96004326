"""Whether as many answers are right as before the loss rose. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.mechanisms.series_by_step import mean_by_step, noise_of_mean
from rankscope.server.detectors.mechanisms.statistics import BLOCK
from rankscope.server.window import Window

SERIES = "accuracy"
# Accuracies before and since a rise that are compared, and the standard errors up to which they are
# the same.
_COMPARED, _SAME = 2 * BLOCK, 2.0
# Rise of the accuracy before, since the first ones, without which it has nothing to lose: chance
# stays chance whatever the loss does. Ten of 100 samples are beyond the scatter of small batches.
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
    """Follows the mean accuracy over the ranks, step by step.

    Attributes:
        first: accuracies of the first steps.
        before: those right before the step that `since` was asked for last, `asked`.
    """

    first: list[float] = field(default_factory=list)
    accuracies: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    asked: int = -1
    before: list[float] = field(default_factory=list)
    _waiting: deque[tuple[int, float]] = field(default_factory=deque)

    def lay(self, window: Window) -> None:
        """Lays what was posted in a window ready; `pass_to` then lets it count step by step."""
        posted = mean_by_step(window, SERIES).items()
        self._waiting.extend(pair for pair in posted if math.isfinite(pair[1]))

    def pass_to(self, step: int) -> None:
        """Lets everything up to and including a step count."""
        while self._waiting and self._waiting[0][0] <= step:
            pair = self._waiting.popleft()
            if len(self.first) < BLOCK:
                self.first.append(pair[1])
            self.accuracies.append(pair)

    def since(self, step: int) -> bool | None:
        """Whether the accuracy since a step is that before; None for too few.

        The scatter is that of neighbouring differences.
        """
        if step != self.asked:
            before = [v for at, v in self.accuracies if at < step]
            self.asked, self.before = step, before[-_COMPARED:]
        since = [v for at, v in self.accuracies if at >= step]
        if len(self.before) < _COMPARED or len(since) < _COMPARED:
            return None
        known = float(np.mean(self.before))
        if known - float(np.mean(self.first)) < _LEARNED:
            return None
        lost = known - float(np.mean(since))
        return lost <= _SAME * math.hypot(noise_of_mean(self.before), noise_of_mean(since))
