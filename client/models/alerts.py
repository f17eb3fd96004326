"""Alerts and silences.

Written by docs/client_models.py (`make docs`). Do not edit by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from rankscope.client.models.notifications import Notification
from rankscope.client.models.runs import Severity


@dataclass(frozen=True)
class Since:
    """Between which steps something began.

    `after`: the last step at which it was right, null where no step before is known; `by`: the
    first step at which it was seen. Steps between the two were not sampled.
    """

    after: int | None
    by: int


@dataclass(frozen=True)
class Acknowledgement:
    """Who knows of an alert; `name` is empty where nobody said, `until` null for ever."""

    name: str
    reason: str
    at: datetime | None
    until: datetime | None


@dataclass(frozen=True)
class Silence:
    """A silence that now holds; `name` is empty where nobody said, `until` null for ever."""

    id: str
    run: str
    kind: str
    name: str
    reason: str
    created_at: datetime
    until: datetime | None


@dataclass(frozen=True)
class Alert:
    """An alert.

    `start`: number of the start of the job in which it was found; `acknowledgement`, `silence`:
    those that now hold, of several silences the one that ends last.
    """

    id: str
    run: str
    kind: str
    severity: Severity
    state: Literal["open", "resolved"]
    title: str
    ranks: list[int]
    tensors: list[str]
    first_step: int
    since: Since
    last_step: int
    opened_at: datetime
    resolved_at: datetime | None
    acknowledged: bool
    acknowledgement: Acknowledgement | None
    silenced: bool
    silence: Silence | None
    stage: str | None
    cause: str
    remedy: str
    evidence: dict[str, Any]
    parent: str | None
    consequences: list[str]
    start: int


@dataclass(frozen=True)
class Transition:
    """Something that happened to an alert."""

    step: int
    at: datetime
    what: str
    reason: str


@dataclass(frozen=True)
class AlertDetail(Alert):
    """An alert with its history, and what each target was told of it."""

    history: list[Transition]
    notifications: list[Notification]


@dataclass(frozen=True)
class ConsoleLines:
    """The last lines that a rank had printed at a step."""

    rank: int
    step: int
    at: datetime
    lines: list[str]


@dataclass(frozen=True)
class GitDiff:
    """What the working tree had beyond its commit when the run began."""

    commit: str
    diff: str
    truncated: bool


@dataclass(frozen=True)
class AlertContext:
    """What is around an alert, as far as the trainer has agreed to send it.

    `console` has two entries a rank at most: the nearest before the alert's first step, and from it
    on; `settings` are the
    configuration's plain values by dotted name.
    """

    console: list[ConsoleLines]
    git_diff: GitDiff | None
    settings: dict[str, str | int | float | bool | None]
