"""An incident while it lasts: what a detector remembers between the first finding and the last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rankscope.server.detectors.base import Finding

# In the evidence of what only samples can show, which may be rare: the last step at which a sample
# found nothing wrong. It began after that, `first_step` at the latest.
AGREED_UNTIL = "agreed_until"


@dataclass(slots=True, kw_only=True)
class Incident:
    """When something went wrong.

    Attributes:
        first_step: since which step, as well as it can be known.
        seen_step: at which it became known; the alert's identity.
        last_step: last step at which it held.
        clear_after: steps without it after which it is over.
    """

    first_step: int
    seen_step: int
    last_step: int
    clear_after: int

    @classmethod
    def since(cls, step: int, last_step: int, *, clear_after: int = 0) -> Incident:
        """One that began at the step at which it was seen, and holds until another, or that one."""
        return Incident(
            first_step=step,
            seen_step=step,
            last_step=max(step, last_step),
            clear_after=clear_after,
        )

    def over(self, step: int) -> bool:
        """Whether it has been quiet long enough at a step; the alert's own rule."""
        return step - self.last_step > self.clear_after

    def finding(
        self,
        *,
        kind: str,
        severity: str,
        title: str,
        cause: str,
        remedy: str,
        key: str = "",
        ranks: tuple[int, ...] = (),
        tensors: tuple[str, ...] = (),
        stage: str | None = None,
        evidence: Mapping[str, Any] | None = None,
    ) -> Finding:
        """What is reported of it, with the steps that it knows itself."""
        return Finding(
            kind=kind,
            key=key,
            severity=severity,
            title=title,
            seen_step=self.seen_step,
            last_step=self.last_step,
            first_step=self.first_step,
            ranks=ranks,
            tensors=tensors,
            stage=stage,
            cause=cause,
            remedy=remedy,
            clear_after=self.clear_after,
            evidence=evidence or {},
        )
