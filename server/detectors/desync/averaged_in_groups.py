"""Ranks whose averages go over a part of them only: groups that never come together. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.desync.recovery import shown
from rankscope.server.detectors.desync.versions import VersionFacts
from rankscope.server.detectors.mechanisms.incident import Incident
from rankscope.server.detectors.mechanisms.wording import count

# Rounds within the same groups, none of which was one of all. Averages in two stages (first on a
# node, then between nodes: hierarchical local SGD, Lin et al. 2020) have up to sixteen of the inner
# ones for one of the outer.
_ROUNDS = 17
# Times as many inner rounds as came before an average of all, once there was one.
_LONGER = 2
# Steps without what it takes to see it, after which it is over.
_CLEAR = 8


@dataclass(slots=True)
class AveragedInGroups:
    """Follows rounds at which ranks, all by themselves before, became equal in groups.

    Attributes:
        groups: those of the newest rounds.
        rounds: how many were seen, without one at which the ranks became equal in another way.
        in_a_row: those of them between which there is no room for another one.
        interval: steps between two rounds, of all or of groups, the fewest so far; `latest`: step
            of the newest.
        needed: rounds in a row that show it.
        found: whether they did.
    """

    groups: tuple[tuple[int, ...], ...] = ()
    rounds: int = 0
    in_a_row: int = 0
    interval: float = math.inf
    latest: int = -1
    needed: int = _ROUNDS
    found: bool = False
    _incident: Incident | None = None
    _ended: list[Finding] = field(default_factory=list)

    def take(self, step: int, facts: VersionFacts) -> None:
        """Takes what digests say of one step."""
        joined = facts.joined or (facts.lags is not None and not any(facts.lags.values()))
        if joined or facts.outside or (facts.groups and facts.groups != self.groups):
            self._end(step)
            if joined and self.rounds:
                self.needed = max(self.needed, _LONGER * self.rounds)
            self.groups, self.rounds, self.in_a_row = facts.groups, 0, 0
        if not (facts.groups or facts.joined):
            return
        if self.latest >= 0:
            self.interval = min(self.interval, step - self.latest)
        # Where steps in between were not sampled, the ranks may have been made equal there.
        if self.latest >= 0 and step - self.latest > self.interval:
            self.in_a_row = 0
        self.latest = step
        if not facts.groups:
            return
        self.rounds += 1
        self.in_a_row += 1
        if self._incident is None:
            self._incident = Incident(
                first_step=step, seen_step=step, last_step=step, clear_after=_CLEAR
            )
        self._incident.last_step = step
        if not self.found:
            self._incident.seen_step = step
        self.found |= self.in_a_row >= self.needed

    def findings(self, last_step: int) -> tuple[list[Finding], bool]:
        """What is to be reported up to a step, and whether it stands then.

        Until something makes them equal ranks in groups stay so, whether it was sampled or not.
        """
        found, self._ended = self._ended, []
        if self._incident is None or not self.found:
            return found, False
        self._incident.last_step = max(self._incident.last_step, last_step)
        return [*found, self._finding(self._incident)], True

    def _end(self, step: int) -> None:
        incident, self._incident = self._incident, None
        known, self.found = self.found, False
        if incident is not None and known:
            incident.last_step = max(incident.last_step, step - 1)
            self._ended.append(self._finding(incident))

    def _finding(self, incident: Incident) -> Finding:
        groups = shown(self.groups)
        return incident.finding(
            kind="desync.parameters",
            key="in groups",
            severity="critical",
            title=f"The ranks are averaged only inside {groups}, and not all together",
            ranks=tuple(sorted(rank for group in self.groups for rank in group)),
            stage="outside_optimizer",
            cause=(
                f"Every rank trains for itself. At {count(self.rounds, 'round')} that were seen, "
                f"the ranks inside {groups} came to hold the same parameters, and at none of them "
                "two of different groups did. Each group trains a model of its own, on its part of "
                "the data: the average went through a process group that holds a part of the ranks "
                "(that of a node, or of another dimension of the mesh)."
            ),
            remedy=(
                "Look at the `group` of the collective that averages: None for all ranks, or a "
                "group that holds one rank of each replica. For averages in two stages, look at "
                "the second one, between the groups."
            ),
            evidence={"groups": [list(group) for group in self.groups], "rounds": self.rounds},
        )
