"""Counts for the server's own metrics."""

from __future__ import annotations

from sqlalchemy import Connection, func, select

from rankscope.agent.wire import SEVERITIES
from rankscope.server.storage import schema

STATES = ("running", "finished", "failed", "lost")


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
