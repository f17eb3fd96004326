"""Whether another optimizer of the process takes turns with the one that is watched."""

from __future__ import annotations

# Rounds in a row that make a habit of it.
_ROUNDS = 4


class Turns:
    """Follows steps of two sorts of optimizers, and the graphs that are built between them.

    Players of a game (a generator and a discriminator) step in turns, each on a backward pass of
    its own. Optimizers of parts of one model step one after the other on the same one: nothing is
    built between their steps.

    Attributes:
        met: graph nodes made when the other one stepped on a graph built since the watched one did;
            -1 where none has, which is all that a step without another optimizer reads.
    """

    __slots__ = ("_rounds", "_step", "met")

    def __init__(self) -> None:
        self.met = -1
        self._step = -2
        self._rounds = 0

    def other(self, nodes: int, before: int) -> None:
        """Another optimizer has stepped.

        Args:
            nodes: of graphs that were made so far.
            before: the same when the watched one stepped last.
        """
        if nodes > before:
            self.met = nodes

    def own(self, step: int, nodes: int) -> bool:
        """The watched one has stepped; whether this is the round that makes it a habit."""
        taken, self.met = 0 <= self.met < nodes, -1
        if not taken or self._rounds > _ROUNDS:
            return False
        self._rounds = self._rounds + 1 if step == self._step + 1 else 1
        self._step = step
        if self._rounds < _ROUNDS:
            return False
        self._rounds += 1
        return True
