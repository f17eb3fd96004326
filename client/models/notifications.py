"""Who is told of alerts.

Written by docs/client_models.py (`make docs`). Do not edit by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from rankscope.client.models.runs import Severity


@dataclass(frozen=True)
class Notification:
    """What a target was told of an alert.

    Attributes:
        name: of the target; empty where it is not there any more.
        told: severity that was told last, or `resolved`.
        waits: whether there is something that it was not told yet.
        next_try_at: null where it does not wait, or was given up.
        error: what came of the last try, where it failed.
    """

    run: str
    alert: str
    title: str
    target: str
    name: str
    told: str | None
    told_at: datetime | None
    waits: bool
    next_try_at: datetime | None
    failures: int
    error: str | None


@dataclass(frozen=True)
class TargetOutcome:
    """What came of telling a target so far; tests are not part of it.

    Of alerts of which the last try failed, `failing_since`, `error` and `next_try_at` are those of
    the newest; `next_try_at` is null where it was given up.

    Attributes:
        told_at: when it took something last.
        waiting: alerts that it is still to be told something of.
        failing: alerts of which the last try failed.
    """

    told_at: datetime | None
    waiting: int
    failing: int
    failing_since: datetime | None
    error: str | None
    next_try_at: datetime | None


@dataclass(frozen=True)
class NotificationTarget:
    """Who is told of alerts; `projects` and `kinds` are null where they are told of all.

    Attributes:
        url: its address without what gives access to it.
        severity: the least one that is told.
    """

    id: str
    name: str
    url: str
    projects: list[str] | None
    kinds: list[str] | None
    severity: Severity
    created_at: datetime
    outcome: TargetOutcome


@dataclass(frozen=True)
class Delivery:
    """What came of a test message."""

    delivered: bool
    error: str | None
