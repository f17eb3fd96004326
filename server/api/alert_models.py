"""The public JSON of alerts, of what people say about them, and of silences."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, AwareDatetime, BaseModel, Field

from rankscope.server.api.models import Model, Number, Severity
from rankscope.server.api.notification_models import Notification


def _storable(text: str) -> str:
    # Databases take neither halves of surrogate pairs nor NUL.
    return text.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


class Transition(BaseModel):
    """Something that happened to an alert."""

    step: int
    at: datetime
    what: str
    reason: str


class Since(BaseModel):
    """Between which steps something began.

    `after`: the last step at which it was right, null where no step before is known; `by`: the
    first step at which it was seen. Steps between the two were not sampled.
    """

    after: int | None
    by: int


class Acknowledgement(BaseModel):
    """Who knows of an alert; `name` is empty where nobody said, `until` null for ever."""

    name: str
    reason: str
    at: datetime | None
    until: datetime | None


class Silence(BaseModel):
    """A silence that now holds; `name` is empty where nobody said, `until` null for ever."""

    id: str
    run: str
    kind: str
    name: str
    reason: str
    created_at: datetime
    until: datetime | None


class Alert(BaseModel):
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


class AlertDetail(Alert):
    """An alert with its history, and what each target was told of it."""

    history: list[Transition]
    notifications: list[Notification]


class ConsoleLines(BaseModel):
    """The last lines that a rank had printed at a step."""

    rank: int
    step: int
    at: datetime
    lines: list[str]


class GitDiff(BaseModel):
    """What the working tree had beyond its commit when the run began."""

    commit: str
    diff: str
    truncated: bool


class AlertContext(BaseModel):
    """What is around an alert, as far as the trainer has agreed to send it.

    `console` has two entries a rank at most: the nearest before the alert's first step, and from it
    on; `settings` are the
    configuration's plain values by dotted name.
    """

    console: list[ConsoleLines]
    git_diff: GitDiff | None
    settings: dict[str, str | int | Number | bool | None]


class AcknowledgeRequest(Model):
    """Who says so, why, and until when: a time, or for some seconds; neither: for ever."""

    name: Annotated[str, AfterValidator(_storable), Field(max_length=200)] = ""
    reason: Annotated[str, AfterValidator(_storable), Field(max_length=2000)] = ""
    until: AwareDatetime | None = None
    seconds: float | None = None


class SilenceRequest(AcknowledgeRequest):
    """A kind that is not to count in a run, who says so, why, and until when.

    `comment` is what `reason` was called before.
    """

    kind: str
    reason: Annotated[
        str,
        AfterValidator(_storable),
        Field(max_length=2000, validation_alias=AliasChoices("reason", "comment")),
    ] = ""
