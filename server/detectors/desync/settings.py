"""Settings that differ between ranks whose parameters are apart by design.

Between two averagings (local SGD), after the last reduction (post-local SGD) and on workers of a
parameter server all links but this one may be broken: what the ranks hold, and their gradients.
With which settings they step is still to be the same, and does not follow from the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rankscope.server.detectors.desync.incident import Apart
from rankscope.server.window import Comparison

STAGE = "hyperparameters"


@dataclass(slots=True)
class Settings:
    """An incident beside that which is meant.

    Attributes:
        incident: the one that stands, or None.
    """

    incident: Apart | None = None

    def take(
        self,
        step: int,
        comparisons: Sequence[Comparison],
        opened: Callable[[Sequence[Comparison]], Apart],
        *,
        meant: bool,
    ) -> Apart | None:
        """Goes through the comparisons of a step.

        Args:
            opened: makes an incident of the comparisons that broke.
            meant: whether the ranks are apart on purpose; where they are not, settings that begin
                to differ are a matter of the chain.

        Returns:
            An incident that is over.
        """
        ended = None
        if self.incident is not None and self.incident.agreeing and self.incident.over(step):
            ended, self.incident = self.incident, None
        known = self.incident
        told = [
            c
            for c in comparisons
            if c.stage == STAGE and (not c.equal or not known or known.covers(c))
        ]
        broken = [c for c in told if not c.equal]
        if known is None:
            if broken and meant:
                self.incident = opened(broken)
                self.incident.tentative = False
                self.incident.take(told)
            return ended
        if broken:
            known.agreeing, known.last_step = False, step
        elif told:
            if not known.agreeing:
                known.last_step = max(known.last_step, step - 1)
            known.agreeing = True
        for comparison in broken:
            known.widen(comparison)
        known.take(told)
        return ended
