"""What is said of a run: a detector's answer, and the alert as it is stored, shown and queried."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class Status(enum.StrEnum):
    """How far a detector could judge a run."""

    OK = "ok"
    OPEN = "open"
    INSUFFICIENT_DATA = "insufficient_data"
    MISSING_INPUT = "missing_input"
    NOT_APPLICABLE = "not_applicable"
    SUSPENDED = "suspended"
    # By the settings of the run.
    OFF = "off"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Check:
    """A detector's answer for a run as it stands.

    Attributes:
        why: one sentence for a person: what was judged, or what is missing.
        early: of a detector's answer, what holds instead, as INSUFFICIENT_DATA, as long as a run
            has been observed too shortly for it; empty where it holds at once.
    """

    status: Status
    why: str
    early: str = ""

    @classmethod
    def ok(cls, why: str, *, early: str = "") -> Check:
        """What was judged, and in order."""
        return cls(Status.OK, why, early)

    @classmethod
    def open(cls, why: str) -> Check:
        """What is wrong."""
        return cls(Status.OPEN, why)

    @classmethod
    def insufficient(cls, why: str) -> Check:
        """What there is so far, and how much is needed."""
        return cls(Status.INSUFFICIENT_DATA, why)

    @classmethod
    def missing(cls, why: str, *, early: str = "") -> Check:
        """What nobody posts."""
        return cls(Status.MISSING_INPUT, why, early)

    @classmethod
    def not_applicable(cls, why: str, *, early: str = "") -> Check:
        """Why there is nothing to be judged in such a run."""
        return cls(Status.NOT_APPLICABLE, why, early)

    @classmethod
    def suspended(cls, why: str) -> Check:
        """Why nothing is judged for the time being."""
        return cls(Status.SUSPENDED, why)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One incident of a run.

    Attributes:
        id: the same whenever the same data are evaluated again: made of the run, the kind, the key,
            the step at which it was first seen, and the start of the job.
        key: the finding's key; `(kind, key)` is the identity of an incident while it is open.
        state: `open` or `resolved`.
        seen_step: step at which it was first seen; `first_step` may be dated back.
        last_step: last step at which it was seen.
        opened_at, resolved_at: seconds since 1970.
        clear_after: steps without a finding after which it resolves; None: never by itself.
        parent: id of the alert whose consequence this is; None for a root.
        consequences: ids of the alerts that follow from this one.
        start: number of the start of the job in which it was found: 0 until it is launched again
            under the same run id and begins where it had begun.
    """

    id: str
    run: str
    kind: str
    key: str
    severity: str
    state: str
    title: str
    first_step: int
    seen_step: int
    last_step: int
    opened_at: float
    cause: str
    remedy: str
    resolved_at: float | None = None
    ranks: tuple[int, ...] = ()
    tensors: tuple[str, ...] = ()
    stage: str | None = None
    clear_after: int | None = 0
    evidence: Mapping[str, Any] = field(default_factory=dict)
    parent: str | None = None
    consequences: tuple[str, ...] = ()
    start: int = 0
