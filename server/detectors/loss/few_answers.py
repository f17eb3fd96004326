"""Whether a jump of the loss is that of one or two answers of a batch. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from rankscope.server.detectors.mechanisms.batch_sizes import whole_batches
from rankscope.server.detectors.mechanisms.series_by_step import mean_by_step, median
from rankscope.server.window import Window

SERIES = ("accuracy", "samples", "tokens")
# Answers that are wrong beside the usual ones: one sample that is hard or has a wrong label, and
# another by chance; half of one for rounding.
_FEW, _ONE = 2.5, 0.5
# What one answer may cost, in nats: single precision knows no smaller probability than e^-104, and
# scores that far apart are of no use to anybody. The loss of 30 is a probability of 1e-13.
_DEAREST = 30.0
# Accuracies whose median is the usual one.
_USUAL = 64
# Share of the answers from which on two of them are no few.
_MOST = 0.1

CAUSE = (
    "At these steps one or two answers of the batch were wrong, and sure of themselves; all others "
    "were as good as before. Samples that are hard or have a wrong label do that once the loss of "
    "the others is next to nothing."
)
REMEDY = (
    "Nothing, if the samples are hard. Log which they are, and look at their labels; label "
    "smoothing keeps a model from being so sure."
)


@dataclass(slots=True)
class FewAnswers:
    """Follows the accuracy, step by step, and how many answers it is of."""

    usual: deque[float] = field(default_factory=lambda: deque(maxlen=_USUAL))
    now: tuple[int, float, float] = (-1, math.nan, math.nan)  # step, accuracy, answers
    _waiting: deque[tuple[int, float, float]] = field(default_factory=deque)

    def lay(self, window: Window) -> None:
        """Lays what was posted in a window ready; `pass_to` then lets it count step by step."""
        accuracies, tokens = (mean_by_step(window, name) for name in ("accuracy", "tokens"))
        # Ranks that share a batch give the same answers.
        whole = dict(zip(window.steps.tolist(), whole_batches(window)[0].tolist(), strict=True))
        for step, accuracy in accuracies.items():
            # Of sequences each token is an answer, and those of one are wrong together.
            if math.isfinite(accuracy) and step not in tokens and math.isfinite(whole[step]):
                self._waiting.append((step, accuracy, whole[step]))

    def pass_to(self, step: int) -> None:
        """Lets everything up to and including a step count."""
        while self._waiting and self._waiting[0][0] <= step:
            if math.isfinite(self.now[1]):
                self.usual.append(self.now[1])
            self.now = self._waiting.popleft()

    def explain(self, step: int, rise: float) -> bool | None:
        """Whether one or two answers more than usual were wrong, and may have cost so much.

        Args:
            rise: of the mean loss over the usual one.

        Returns:
            None where it is not known.
        """
        at, accuracy, answers = self.now
        if at != step or not self.usual or _FEW > _MOST * answers:
            return None
        lost = (median(list(self.usual)) - accuracy) * answers
        return _ONE <= lost <= _FEW and rise * answers <= _DEAREST * _FEW
