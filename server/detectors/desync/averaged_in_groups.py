"""Ranks whose averages go over a part of them only: groups that never come together. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.desync.recovery import shown
from rankscope.server.detectors.desync.versions import VersionFacts
from rankscope.server.detectors.mechanisms.incident import Incident
from rankscope.server.detectors.mechanisms.wording import count

# Rounds within the same groups, none of which was one of all. Averages in two stages (first on a
# node, then between nodes: hierarchical local SGD, Lin et al. 2020) have up to eight of the inner
# ones for one of the outer.
_ROUNDS = 9


@dataclass(slots=True)
class AveragedInGroups:
    """Follows rounds at which ranks, all by themselves before, became equal in groups.

    Attributes:
        groups: those of the newest rounds.
        rounds: how many there were, without one at which the ranks became equal in another way.
    """

    groups: tuple[tuple[int, ...], ...] = ()
    rounds: int = 0
    _interval: int = 1
    _incident: Incident | None = None

    def take(self, step: int, facts: VersionFacts) -> None:
        """Takes what digests say of one step."""
        if facts.joined or facts.outside or (facts.groups and facts.groups != self.groups):
            self.groups, self.rounds, self._incident = facts.groups, 0, None
        if not facts.groups:
            return
        self.rounds += 1
        if self._incident is None:
            self._incident = Incident(
                first_step=step, seen_step=step, last_step=step, clear_after=0
            )
        incident = self._incident
        if step > incident.last_step:
            self._interval = step - incident.last_step
        incident.last_step = step
        incident.clear_after = 2 * self._interval
        if self.rounds <= _ROUNDS:
            incident.seen_step = step

    def finding(self) -> Finding | None:
        """What is to be reported while it lasts."""
        if self._incident is None or self.rounds < _ROUNDS:
            return None
        groups = shown(self.groups)
        return self._incident.finding(
            kind="desync.parameters",
            key="in groups",
            severity="critical",
            title=f"The ranks are averaged only inside {groups}, never all together",
            ranks=tuple(sorted(rank for group in self.groups for rank in group)),
            stage="outside_optimizer",
            cause=(
                f"Every rank trains for itself. At {count(self.rounds, 'round')}, "
                f"{count(self._interval, 'step')} apart, the ranks inside {groups} came to hold "
                "the same parameters, and at none of them two of different groups did. Each group "
                "trains a model of its own, on its part of the data: the average went through a "
                "process group that holds a part of the ranks (that of a node, or of another "
                "dimension of the mesh)."
            ),
            remedy=(
                "Look at the `group` of the collective that averages: None for all ranks, or a "
                "group that holds one rank of each replica. For averages in two stages, look at "
                "the second one, between the groups."
            ),
            evidence={"groups": [list(group) for group in self.groups], "rounds": self.rounds},
        )
