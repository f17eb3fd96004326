"""The public JSON of notifications: their targets, their log, and tests."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, Field

from rankscope.server.api.models import Severity


class TargetOutcome(BaseModel):
    """What came of telling a target so far; tests are not part of it.

    Of alerts of which the last try failed, `failing_since`, `error` and `next_try_at` are those of
    the newest; `next_try_at` is null where it was given up.
    """

    told_at: datetime | None = Field(description="when it took something last")
    waiting: int = Field(description="alerts that it is still to be told something of")
    failing: int = Field(description="alerts of which the last try failed")
    failing_since: datetime | None
    error: str | None
    next_try_at: datetime | None


class NotificationTarget(BaseModel):
    """Who is told of alerts; `projects` and `kinds` are null where they are told of all."""

    id: str
    name: str
    url: str = Field(description="its address without what gives access to it")
    projects: list[str] | None
    kinds: list[str] | None
    severity: Severity = Field(description="the least one that is told")
    created_at: datetime
    outcome: TargetOutcome


class Notification(BaseModel):
    """What a target was told of an alert."""

    run: str
    alert: str
    title: str
    target: str
    name: str = Field(description="of the target; empty where it is not there any more")
    told: str | None = Field(description="severity that was told last, or `resolved`")
    told_at: datetime | None
    waits: bool = Field(description="whether there is something that it was not told yet")
    next_try_at: datetime | None = Field(description="null where it does not wait, or was given up")
    failures: int
    error: str | None = Field(description="what came of the last try, where it failed")


class Delivery(BaseModel):
    """What came of a test message."""

    delivered: bool
    error: str | None
