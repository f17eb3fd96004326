"""When an incident began: what is sampled began at some step since the sample before."""

from __future__ import annotations

from rankscope.server.detectors.mechanisms.incident import AGREED_UNTIL
from rankscope.server.window import Alert


def since(alert: Alert) -> tuple[int, int]:
    """The earliest and the latest step at which it can have begun, both included.

    The latest is `first_step`. The earliest follows the last sample at which the same comparison
    found nothing; where the detector saw every step, or there is no such sample, both are one.
    """
    agreed = alert.evidence.get(AGREED_UNTIL)
    if not isinstance(agreed, int) or isinstance(agreed, bool):
        return alert.first_step, alert.first_step
    return min(agreed + 1, alert.first_step), alert.first_step
