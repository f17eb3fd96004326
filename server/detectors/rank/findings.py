"""What the findings of late ranks have in common, whatever they are late with."""

from __future__ import annotations

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.rank.jitter import Jittering, JitterPolicy
from rankscope.server.detectors.rank.lateness import Late

# More than half of the time is waited for them: the job would be twice as fast without.
_CRITICAL = 0.5


def finding_of_late(
    late: Late, *, kind: str, own: str, title: str, cause: str, remedy: str, key: str = ""
) -> Finding:
    """Of ranks that are late all the time.

    Args:
        own: name in the evidence of the seconds that they take.
    """
    return late.finding(
        kind=kind,
        key=key,
        severity="critical" if late.lost > _CRITICAL else "warning",
        title=title,
        ranks=late.ranks,
        cause=cause,
        remedy=remedy,
        evidence={own: late.own, "others_seconds": late.others, **late.evidence()},
    )


def finding_of_jitter(
    late: Jittering, policy: JitterPolicy, *, kind: str, title: str, cause: str, remedy: str
) -> Finding:
    """Of one that is late now and then."""
    return late.finding(
        kind=kind,
        key="jitter",
        severity="warning" if late.lost >= policy.jitter_lost else "info",
        title=title,
        ranks=(late.rank,),
        cause=cause,
        remedy=remedy,
        evidence=late.evidence(),
    )
