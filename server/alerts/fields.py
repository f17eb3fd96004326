"""An alert as others get it, by REST and in messages: names and values."""

from __future__ import annotations

from typing import Any

from rankscope.server.alerts import onset
from rankscope.server.window import Alert


def alert_fields(alert: Alert) -> dict[str, Any]:
    """Members of an alert's JSON that the alert itself has; times in seconds since 1970."""
    earliest, latest = onset.since(alert)
    return {
        "id": alert.id,
        "run": alert.run,
        "kind": alert.kind,
        "severity": alert.severity,
        "state": alert.state,
        "title": alert.title,
        "ranks": list(alert.ranks),
        "tensors": list(alert.tensors),
        "first_step": alert.first_step,
        "since": {"after": earliest - 1 if earliest > 0 else None, "by": latest},
        "last_step": alert.last_step,
        "opened_at": alert.opened_at,
        "resolved_at": alert.resolved_at,
        "stage": alert.stage,
        "cause": alert.cause,
        "remedy": alert.remedy,
        "evidence": dict(alert.evidence),
        "parent": alert.parent,
        "consequences": list(alert.consequences),
        "start": alert.start,
    }
