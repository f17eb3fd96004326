"""An incident of one link alone, beside that of the chain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rankscope.server.detectors.desync.incident import Divergence
from rankscope.server.window import Comparison


@dataclass(slots=True)
class Beside:
    """Of one link, whatever the others are found to be.

    Attributes:
        stage: the link.
        incident: the one that stands, or None.
    """

    stage: str
    incident: Divergence | None = None

    def take(
        self,
        step: int,
        comparisons: Sequence[Comparison],
        opened: Callable[[Sequence[Comparison]], Divergence],
        *,
        begins: bool = True,
    ) -> Divergence | None:
        """Goes through the comparisons of a step.

        Args:
            opened: makes an incident of the comparisons that broke.
            begins: whether one may begin now.

        Returns:
            An incident that is over.
        """
        ended = None
        if self.incident is not None and self.incident.agreeing and self.incident.over(step):
            ended, self.incident = self.incident, None
        known = self.incident
        sampled = [
            c
            for c in comparisons
            if c.stage == self.stage and (not c.equal or not known or known.covers(c))
        ]
        broken = [c for c in sampled if not c.equal]
        if known is None:
            if broken and begins:
                self.incident = opened(broken)
                self.incident.tentative = False
                self.incident.take(sampled)
            return ended
        if broken:
            known.agreeing, known.last_step = False, step
        elif sampled:
            if not known.agreeing:
                known.last_step = max(known.last_step, step - 1)
            known.agreeing = True
        for comparison in broken:
            known.widen(comparison)
        known.take(sampled)
        return ended
