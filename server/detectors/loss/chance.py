"""Whether a loss is what guessing costs: the logarithm of the number of answers. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rankscope.server.detectors.mechanisms.samples import layer_samples
from rankscope.server.window import Window

# Of how many answers guessing costs something.
_FEWEST = 2


@dataclass(slots=True)
class Chance:
    """How many answers a model gives, by the shape of its last tensor.

    Attributes:
        answers: numbers that it may be: the length of a bias, or either side of a matrix, as
            frameworks keep both ways round.
    """

    answers: tuple[int, ...] = ()

    def take(self, window: Window) -> None:
        """Takes the shapes of the tensors that were posted with a window."""
        if self.answers:
            return
        for _, found in layer_samples(window, "weight_norm", "grad_norm"):
            for sample in found.values():
                last = next((s for s in reversed(sample.shapes) if 0 < len(s) <= 2), ())
                self.answers = tuple(sorted({side for side in last if side >= _FEWEST}))
                return

    def among(self, loss: float, tolerance: float) -> int:
        """Of how many answers the loss is that of guessing; 0 for none.

        Args:
            tolerance: largest distance from the logarithm of their number, as a share of it.
        """
        for number in self.answers:
            if abs(loss - math.log(number)) <= tolerance * math.log(number):
                return number
        return 0
