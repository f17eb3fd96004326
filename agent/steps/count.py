"""The number of the step in progress, where the hook that counts it reaches it at once.

At most steps nothing is due but that they are counted. What that costs is decided by how much
memory it touches: after a training step none of the agent's is in the caches, and each function
that is called, each dictionary that is asked is fetched anew. So all of it is in one object.
"""

from __future__ import annotations

from typing import Any


class StepCount:
    """Counts the steps of one monitor.

    Attributes:
        step: the one in progress.
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
