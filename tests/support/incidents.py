"""Findings at steps in, alerts and what happened to them out: the language of time lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rankscope.server.alerts import causes, lifecycle
from rankscope.server.detectors.base import Finding
from rankscope.server.window import Alert

RUN = "digits"


def finding(kind: str, seen_step: int, last_step: int | None = None, **more: Any) -> Finding:
    """A finding of one step, unless given otherwise, since that step."""
    known: dict[str, Any] = {
        "severity": "warning",
        "title": f"{kind} seen at {seen_step}",
        "first_step": seen_step,
        "cause": "A cause.",
        "remedy": "A remedy.",
    }
    return Finding(
        kind=kind,
        seen_step=seen_step,
        last_step=seen_step if last_step is None else last_step,
        **(known | more),
    )


class TimeLine:
    """A run's alerts while it is evaluated block by block.

    Attributes:
        told: `step what kind` of all that happened, in order.
    """

    def __init__(self, run: str = RUN) -> None:
        self.run = run
        self.alerts: dict[str, Alert] = {}
        self.told: list[str] = []
        self.reasons: list[str] = []

    def through(
        self,
        step: int,
        *findings: Finding,
        now: float = 0.0,
        heard_at: Mapping[int, float] | None = None,
        world_size: int | None = None,
    ) -> list[str]:
        """Evaluates up to a step; returns what happened, as `told` has it."""
        folded = lifecycle.fold(
            tuple(self.alerts.values()),
            findings,
            run=self.run,
            through_step=step,
            now=now,
            heard_at=heard_at,
            world_size=world_size,
        )
        self.alerts |= {alert.id: alert for alert in folded.alerts}
        before = tuple(self.alerts.values())
        linked = causes.link(before)
        self.alerts |= {alert.id: alert for alert in linked}
        happened = [*folded.transitions]
        happened += causes.transitions(before, linked, through_step=step, now=now)
        told = [f"{t.step} {t.what} {self.alerts[t.alert_id].kind}" for t in happened]
        self.told += told
        self.reasons += [t.reason for t in happened]
        return told

    def one(self, kind: str) -> Alert:
        """The only alert of a kind."""
        (alert,) = (a for a in self.alerts.values() if a.kind == kind)
        return alert

    def roots(self) -> list[str]:
        """Kinds of the roots, by steps."""
        found = [a for a in self.alerts.values() if a.parent is None]
        return [a.kind for a in sorted(found, key=lambda a: (a.first_step, a.kind))]


def timeless(alerts: Iterable[Alert]) -> dict[str, Alert]:
    """By id, without what the server's clock says."""
    return {
        a.id: replace(a, opened_at=0.0, resolved_at=None if a.resolved_at is None else 0.0)
        for a in alerts
    }


def alert(kind: str, first_step: int, **more: Any) -> Alert:
    """An open alert."""
    opened = lifecycle.fold(
        (), [finding(kind, first_step)], run=RUN, through_step=first_step, now=0.0
    ).alerts[0]
    return replace(opened, **({"id": f"{kind}@{first_step}"} | more))


def forever(kind: str, first_step: int, **more: Any) -> Alert:
    """An alert that does not end by itself."""
    return alert(kind, first_step, clear_after=None, **more)


def linked(alerts: Sequence[Alert]) -> dict[str, Alert]:
    """All of them by id, as `link` leaves them."""
    before = {a.id: a for a in alerts}
    return before | {a.id: a for a in causes.link(alerts)}
