"""Ranks that leave every synchronisation with other values than most of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from rankscope.server.detectors.desync.versions import VersionFacts

# Rounds at which the same ranks were left out, and none at which all of them met: two of them may
# be a group that meets more often than the others do.
_ROUNDS = 3


@dataclass(slots=True)
class NeverMet:
    """Follows rounds at which most ranks, all by themselves before, came to hold the same.

    Where all of them have met before, one that is left out once has missed it. A rank that has
    never met the others is left out of every round instead, as where its own part of the
    synchronisation (an outer optimizer's momentum or rate) is another one from the start.

    Attributes:
        outside: ranks that were not part of the newest rounds.
        rounds: steps of these, without one at which all ranks met.
    """

    outside: tuple[int, ...] = ()
    rounds: list[int] = field(default_factory=list)

    def take(self, step: int, facts: VersionFacts) -> None:
        """Takes what digests say of one step."""
        if facts.joined or (facts.outside and facts.outside != self.outside):
            self.outside, self.rounds = facts.outside, []
        if facts.outside:
            self.rounds = [*self.rounds[: _ROUNDS - 1], step]

    @property
    def found(self) -> bool:
        """Whether it is no chance."""
        return len(self.rounds) == _ROUNDS

    @property
    def interval(self) -> int:
        """Steps between the first two of the rounds."""
        return self.rounds[1] - self.rounds[0]
