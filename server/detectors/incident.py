"""An incident while it lasts: what a detector remembers between the first finding and the last."""

from __future__ import annotations

from dataclasses import dataclass

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

    def over(self, step: int) -> bool:
        """Whether it has been quiet long enough at a step; the alert's own rule."""
        return step - self.last_step > self.clear_after
