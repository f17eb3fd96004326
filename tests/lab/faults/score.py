"""What was expected against what the server says. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.lab.faults.case import SEVERITIES, Expected

Alert = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One run of one case.

    Attributes:
        detected: there is a root alert of the least severity or above that does not begin before
            the fault.
        kind, stage, ranks, tensors, severity, onset: whether the alert is right about it.
        right: kind, stage, ranks and tensors together.
        delay: steps from the fault to the alert's first step; None without an alert.
        extra: further root alerts of severity warning or above.
        false_alarms: such alerts where nothing was injected.
        error: why the case could not be judged; then nothing else counts.
    """

    detected: bool = False
    kind: bool = False
    stage: bool = False
    ranks: bool = False
    tensors: bool = False
    severity: bool = False
    onset: bool = False
    delay: int | None = None
    extra: int = 0
    false_alarms: int = 0
    error: str = ""

    @property
    def right(self) -> bool:
        """Kind, stage, ranks and tensors together."""
        return self.detected and self.kind and self.stage and self.ranks and self.tensors

    def as_json(self) -> dict[str, Any]:
        """All of it, JSON-able."""
        return {**asdict(self), "right": self.right}


def score(expected: Expected, roots: Sequence[Alert], *, slack: int) -> tuple[Score, Alert | None]:
    """Judges the root alerts of a run.

    Args:
        slack: steps between two samples of the agent: what was broken in between is dated by it.

    Returns:
        The score, and the alert that it is about.
    """
    serious = [alert for alert in roots if _level(alert["severity"]) >= _level("warning")]
    if not expected.kinds:
        return Score(false_alarms=len(serious)), serious[0] if serious else None
    loud = [a for a in roots if _level(a["severity"]) >= _level(expected.severity)]
    possible = [a for a in loud if a["first_step"] >= expected.step - expected.tolerance]
    if not possible:
        return Score(extra=len(serious)), None
    scored = [(_judged(expected, alert, slack), alert) for alert in possible]
    best, alert = max(
        scored,
        key=lambda pair: (
            pair[0].right,
            pair[0].kind,
            pair[0].stage + pair[0].ranks + pair[0].tensors,
            -abs(pair[0].delay or 0),
        ),
    )
    extra = sum(other is not alert for other in serious)
    return Score(**{**asdict(best), "extra": extra}), alert


def _judged(expected: Expected, alert: Alert, slack: int) -> Score:
    delay = alert["first_step"] - expected.step
    severity = _level(alert["severity"])
    return Score(
        detected=True,
        kind=alert["kind"] in expected.kinds,
        stage=not expected.stages or alert["stage"] in expected.stages,
        ranks=not expected.ranks or frozenset(alert["ranks"]) in expected.ranks,
        tensors=expected.tensors is None or frozenset(alert["tensors"]) == expected.tensors,
        severity=_level(expected.severity) <= severity <= _level(expected.ceiling),
        onset=-expected.tolerance <= delay <= max(expected.tolerance, slack),
        delay=delay,
    )


def _level(severity: str) -> int:
    return SEVERITIES.index(severity)
