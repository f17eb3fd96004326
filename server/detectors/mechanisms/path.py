"""How far the steps of a run have moved its parameters. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Path:
    """The sum of all updates, relative to the parameters, as far as they were sampled.

    Were all steps of one direction, the parameters would have moved by so much of their size.

    Attributes:
        steps: how many they were; `at`: the newest, -1 before the first.
    """

    length: float = 0.0
    steps: int = 0
    at: int = -1

    def push(self, step: int, update: float) -> None:
        """Takes a sample; it stands for the steps since the one before, as they are dense first."""
        steps = max(step - self.at, 1) if self.at >= 0 else 1
        self.length += update * steps
        self.steps += steps
        self.at = step
