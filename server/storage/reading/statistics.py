"""Counts for the server's own metrics."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, func, or_, select

from rankscope.agent.wire import SEVERITIES
from rankscope.server.storage import schema
from rankscope.server.storage.access.visibility import of_visible

STATES = ("running", "finished", "failed", "lost")
# A run that ended so long ago was seen by whoever asks every few minutes.
_JUST_ENDED_S = 900.0
# Those with the newest start, and alerts of these. Two series for each run and one for each kind of
# alert that is open, of which there are rarely more than five: some 2,000, of which Prometheus
# takes millions.
_MOST_RUNS = 200


@dataclass(frozen=True, slots=True)
class RecentRun:
    """A run that is running, or has just ended; `last_seen_at` in seconds since 1970."""

    key: int
    id: str
    project: str
    last_step: int
    last_seen_at: float


def runs_by_state(connection: Connection) -> dict[str, int]:
    """Number of runs in each state."""
    r = schema.run
    rows = connection.execute(select(r.c.state, func.count()).group_by(r.c.state))
    return dict.fromkeys(STATES, 0) | {row[0]: row[1] for row in rows}


def open_alerts(connection: Connection) -> dict[str, int]:
    """Number of open root alerts of each severity."""
    a = schema.alert
    rows = connection.execute(
        select(a.c.severity, func.count())
        .where(a.c.state == "open", a.c.parent.is_(None))
        .group_by(a.c.severity)
    )
    return dict.fromkeys(SEVERITIES, 0) | {row[0]: row[1] for row in rows}


def unevaluated(connection: Connection) -> int:
    """Number of runs with data that no detector has seen yet."""
    r = schema.run
    return int(connection.scalar(select(func.count()).where(r.c.arrivals > r.c.evaluated)) or 0)


def recent_runs(connection: Connection, *, now: float) -> tuple[list[RecentRun], int]:
    """Runs that run or have just ended, the newest start first, and how many more there are.

    Args:
        now: seconds since 1970.
    """
    r = schema.run
    recent = or_(r.c.state == "running", r.c.last_seen_at > now - _JUST_ENDED_S)
    recent = recent & of_visible(r.c.project)
    found = connection.execute(
        select(r.c.key, r.c.id, r.c.project, r.c.last_step, r.c.last_seen_at)
        .where(recent)
        .order_by(r.c.started_at.desc(), r.c.key)
        .limit(_MOST_RUNS)
    ).all()
    count = int(connection.scalar(select(func.count()).where(recent)) or 0)
    return [RecentRun(*row) for row in found], count - len(found)
