"""What a target is to be told of an alert, by what it has been told before. Pure."""

from __future__ import annotations

from fnmatch import fnmatchcase

from rankscope.agent import wire
from rankscope.server.storage.judgement.notifications import RESOLVED, Notification, Target
from rankscope.server.window import Alert

FIRST_WAIT_S = 10.0
"""From the moment that an alert is there until it is told: what follows from it joins it."""

BETWEEN_S = 60.0
"""Between two messages to one target about one run: what opens meanwhile goes into one."""

_FIRST_RETRY_S, _LAST_RETRY_S = 5.0, 900.0
GIVES_UP_AFTER_S = 3 * 86400.0
"""For so long what could not be told is tried again."""


def covers(target: Target, *, project: str, alert: Alert) -> bool:
    """Whether a target wants to hear of an alert of a project, were it open."""
    if target.projects is not None and project not in target.projects:
        return False
    if target.kinds is not None and not any(fnmatchcase(alert.kind, k) for k in target.kinds):
        return False
    return _grade(alert.severity) >= _grade(target.severity)


def what_to_tell(
    alert: Alert, target: Target, *, project: str, quiet: bool, before: Notification | None
) -> str:
    """`opened`, `raised`, `reopened`, `resolved`; empty where there is nothing to tell.

    An alert that is over before it was told is told all the same, once: as resolved.

    Args:
        alert: a root, with the severity that it is shown with.
        quiet: whether somebody has silenced or acknowledged it.
        before: what the target was told of it.
    """
    told = "" if before is None else before.told
    wanted = covers(target, project=project, alert=alert) and not quiet
    over = alert.state == RESOLVED
    if told == "":
        if not wanted or alert.opened_at < target.created_at:
            return ""
        return "resolved" if over else "opened"
    if over:
        return "" if told == RESOLVED else "resolved"
    if not wanted:
        return ""
    if told == RESOLVED:
        return "reopened"
    return "raised" if _grade(alert.severity) > _grade(told) else ""


def retry_at(one: Notification, *, now: float) -> float | None:
    """When what failed once more is tried again, seconds since 1970; None: it is given up."""
    if one.wanted_at is not None and now - one.wanted_at > GIVES_UP_AFTER_S:
        return None
    # Beyond 2 to the 10th it is the longest pause anyway.
    return now + min(_FIRST_RETRY_S * 2.0 ** min(one.failures, 10), _LAST_RETRY_S)


def _grade(severity: str) -> int:
    return wire.SEVERITIES.index(severity)
