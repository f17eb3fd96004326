"""How far the steps of a run have moved its parameters. Pure."""

from __future__ import annotations

from dataclasses import dataclass

# Gaps between samples after which another one is overdue: they become longer by powers of two.
_GAPS = 8


@dataclass(slots=True)
class Path:
    """The sum of all updates, relative to the parameters, as far as they were sampled.

    Were all steps of one direction, the parameters would have moved by so much of their size.

    Attributes:
        steps: how many they were; `at`: the newest, -1 before the first; `gap`: from the one before
            to that.
    """

    length: float = 0.0
    steps: int = 0
    at: int = -1
    gap: int = 1

    def push(self, step: int, update: float) -> None:
        """Takes a sample; it stands for the steps since the one before, as they are dense first."""
        steps = max(step - self.at, 1) if self.at >= 0 else 1
        self.length += update * steps
        self.steps += steps
        self.at, self.gap = step, steps

    def fresh(self, step: int, within: int) -> bool:
        """Whether updates that were sampled so far say something of a step.

        Where samples are dense at first and then end, they are those of a warm-up.

        Args:
            within: steps within which they do, if samples are not further apart.
        """
        return step - self.at <= max(within, _GAPS * self.gap)
