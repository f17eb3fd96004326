"""The number of the step in progress, where the hook that counts it reaches it at once.

At most steps nothing is due but that they are counted. What that costs is decided by how much
memory it touches: after a training step none of the agent's is in the caches, and each function
that is called, each dictionary that is asked is fetched anew. So all of it is in one object.
"""

from __future__ import annotations

from typing import Any


class StepCount:
    """Counts the steps of one monitor. Nothing else writes the number of the step in progress.

    Attributes:
        step: the one in progress; to be read only.
        nodes: how many graph nodes the thread had made when the step before ended.
        until: the first step at whose beginning something more is to be done than to count. 0 where
            it is to be asked at every step.
        optimizer: whose steps are counted, None for nobody's. As an ordinary reference: to ask a
            weak one costs a fourth of all that is done at such a step.
    """

    __slots__ = ("nodes", "optimizer", "step", "until")

    def __init__(self, step: int) -> None:
        self.step = step
        self.nodes = 0
        self.until = 0
        self.optimizer: Any = None

    def passed(self, nodes: int) -> bool:
        """The step in progress has ended; counted if nothing is due at the next one.

        Args:
            nodes: of graphs that were made so far.

        Returns:
            Whether it was counted.
        """
        step = self.step + 1
        if step >= self.until:
            return False
        self.step = step
        self.nodes = nodes
        return True

    def ended(self, nodes: int = 0) -> int:
        """The step in progress has ended; the one that is in progress now."""
        self.step += 1
        self.nodes = nodes
        return self.step

    def go_to(self, step: int) -> None:
        """A later step is in progress; an earlier one is not gone back to."""
        self.step = max(self.step, step)
