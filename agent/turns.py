"""Whether another optimizer of the process takes turns with the one that is watched."""

from __future__ import annotations

# Rounds in a row that make a habit of it.
_ROUNDS = 4


class Turns:
    """Follows steps of two sorts of optimizers, and the graphs that are built between them.

    Players of a game (a generator and a discriminator) step in turns, each on a backward pass of
    its own. Optimizers of parts of one model step one after the other on the same one: nothing is
    built between their steps.
    """

    __slots__ = ("_other", "_own", "_rounds")

    def __init__(self) -> None:
        self._own = self._other = -1
        self._rounds = 0

    def other(self, nodes: int) -> None:
        """Another optimizer has stepped.

        Args:
            nodes: of graphs that were made so far.
        """
        if nodes > self._own >= 0:
            self._other = nodes

    def own(self, nodes: int) -> bool:
        """The watched one has stepped; whether this is the round that makes it a habit."""
        taken = self._other >= 0 and nodes > self._other
        if self._rounds < _ROUNDS:
            self._rounds = self._rounds + 1 if taken else 0
        told = taken and self._rounds == _ROUNDS
        if told:
            self._rounds += 1
        self._own, self._other = nodes, -1
        return told
