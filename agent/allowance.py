"""What may be spent once, on sampling the beginning of a run in full. Pure: it reads no clock."""

from __future__ import annotations

import math
import statistics

# This share of the allowance goes to the first steps, all of which are sampled: 2 s of 10, which
# is 200 samples of 10 ms, and as long as a trainer takes to import torch.
_CREDIT = 0.2
# After that samples lengthen the mean step by no more than this share of what it takes without
# them: with the whole allowance a run is 10 s later at its 41st second, and never again.
_LONGEST = 0.25
# Steps after which it is judged anew how many of them can be sampled, and intervals of samples
# that there are to be among them: of a single one the costs say little.
_STEPS, _INTERVALS = 8, 2
# Samples come more often again where that fits with this much room, so that noise in the measured
# times does not make them jump to and fro.
_ROOM = 0.7
# At least one step in 1,024 is sampled, as by the budget.
_MOST_MASK = (1 << 10) - 1


class Allowance:
    """Seconds of the agent's own time for full samples, and the steps that they go to.

    Those divisible by a power of two: ranks choose it on their own, from what they measure, and
    share every step of the rank that samples least, as in the plan that follows (design, section
    3).

    Attributes:
        lasts: there is something left of it.
        mask: steps without these bits are sampled.
        spent: seconds.

    Args:
        seconds: what may be spent; infinite: every step is sampled, whatever it takes.
    """

    __slots__ = ("_own", "_plain", "_seconds", "_since", "lasts", "mask", "spent")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.lasts = seconds > 0
        self.mask = 0
        self.spent = 0.0
        self._begin()

    @property
    def interval(self) -> int:
        """Steps from one sample to the next; 0 where nothing is left."""
        return self.mask + 1 if self.lasts else 0

    def note(self, steps: float, seconds: float, own: float) -> None:
        """Takes what steps cost.

        Args:
            steps: number of steps since the last note.
            seconds: how long they took.
            own: seconds of the agent among them.
        """
        self.spent += own
        if math.isinf(self._seconds):
            return
        self.lasts = self.spent < self._seconds
        if self.spent < _CREDIT * self._seconds:
            return
        self._since += steps
        self._own += own
        # Of what the agent takes some lies in the step after.
        self._plain.append(max(seconds - own, seconds / 2) / steps)
        if self._since >= max(_STEPS, _INTERVALS * (self.mask + 1)):
            self._thin()

    def _thin(self) -> None:
        # A median: pauses do not make steps longer.
        most = _LONGEST * statistics.median(self._plain) * self._since
        own = self._own
        if own > most:
            while own > most and self.mask < _MOST_MASK:
                self.mask = 2 * self.mask + 1
                own /= 2
        elif 2 * own <= _ROOM * most:
            self.mask >>= 1
        self._begin()

    def _begin(self) -> None:
        self._since = self._own = 0.0
        self._plain: list[float] = []
