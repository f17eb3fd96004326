"""Notifications: who is notified of alerts, what was sent, and a message to try it.

Targets are added by `rankscope notify` on the database itself: whoever may change something by REST
is not to have the server call any address.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, cast

from fastapi import APIRouter, Query, Request
from sqlalchemy import Connection

from rankscope.server.api import models, notification_models
from rankscope.server.api.deps import Database, known_run
from rankscope.server.api.problems import Problem
from rankscope.server.notifications import transports
from rankscope.server.notifications.message import example
from rankscope.server.storage.access.visibility import visible
from rankscope.server.storage.database.engine import reading
from rankscope.server.storage.judgement import notifications
from rankscope.server.storage.judgement.notifications import Notification, Outcome, Target

router = APIRouter(tags=["notifications"], prefix="/notifications")

_logger = logging.getLogger(__name__)

Limit = Annotated[int, Query(ge=1, le=500, description="longest list")]


@router.get("")
def list_notifications(
    engine: Database,
    run: str | None = None,
    alert: Annotated[str | None, Query(description="id of an alert")] = None,
    pending: Annotated[bool, Query(description="what waits or failed alone")] = False,
    limit: Limit = 100,
) -> models.Items[notification_models.Notification]:
    """What was told of alerts and what waits, the newest first."""
    with reading(engine) as connection:
        key = None if run is None else known_run(connection, run).key
        return models.Items(
            items=log_entries(connection, limit=limit, run=key, alert=alert, pending=pending)
        )


@router.get("/targets")
def list_targets(engine: Database) -> models.Items[notification_models.NotificationTarget]:
    """Who is told of alerts; their addresses without what gives access to them."""
    with reading(engine) as connection:
        found = _visible_targets(notifications.targets(connection))
        outcomes = notifications.outcomes(connection)
    return models.Items(items=[target_model(t, outcomes.get(t.id, Outcome())) for t in found])


@router.post("/targets/{target}/test")
def send_test(request: Request, engine: Database, target: str) -> notification_models.Delivery:
    """Sends a test message to a target, and answers what came of it."""
    with reading(engine) as connection:
        found = [t for t in _visible_targets(notifications.targets(connection)) if t.id == target]
    if not found:
        raise Problem(
            404, f"there is no target {target!r}; GET /api/v1/notifications/targets lists them"
        )
    try:
        transports.deliver(
            found[0].url,
            example("", time.time()),
            commands=request.app.state.cordon_commands,
        )
    except (transports.NotDelivered, transports.BadTarget) as error:
        return notification_models.Delivery(delivered=False, error=str(error))
    except Exception as error:
        # A service's library may raise whatever it likes, and say addresses with their secrets.
        _logger.debug("%s cannot be told", found[0].name, exc_info=True)
        return notification_models.Delivery(delivered=False, error=type(error).__name__)
    return notification_models.Delivery(delivered=True, error=None)


def target_model(target: Target, outcome: Outcome) -> notification_models.NotificationTarget:
    """A target, its address masked, and what came of telling it."""
    return notification_models.NotificationTarget(
        id=target.id,
        name=target.name,
        url=transports.masked(target.url),
        projects=None if target.projects is None else list(target.projects),
        kinds=None if target.kinds is None else list(target.kinds),
        severity=cast(models.Severity, target.severity),
        created_at=models.time_of(target.created_at),
        outcome=notification_models.TargetOutcome(
            told_at=_time(outcome.told_at),
            waiting=outcome.waiting,
            failing=outcome.failing,
            failing_since=_time(outcome.failing_since),
            error=outcome.error or None,
            next_try_at=_time(outcome.next_try_at),
        ),
    )


def log_entries(
    connection: Connection, *, limit: int, run: int | None, alert: str | None, pending: bool
) -> list[notification_models.Notification]:
    """What targets that may be seen were told, the newest first."""
    names = {t.id: t.name for t in _visible_targets(notifications.targets(connection))}
    found = notifications.log(
        connection, limit=limit, run=run, alert=alert, targets=list(names), open_only=pending
    )
    return [notification_model(run_id, title, one, names) for run_id, title, one in found]


def notification_model(
    run: str, title: str, one: Notification, names: Mapping[str, str]
) -> notification_models.Notification:
    """What a target was told of an alert.

    Args:
        names: of the targets, by id.
    """
    waits = one.wanted_at is not None
    return notification_models.Notification(
        run=run,
        alert=one.alert,
        title=title,
        target=one.target,
        name=names.get(one.target, ""),
        told=one.told or None,
        told_at=_time(one.told_at),
        waits=waits,
        next_try_at=_time(one.due_at) if waits else None,
        failures=one.failures,
        error=one.error or None,
    )


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else models.time_of(seconds)


def _visible_targets(targets: list[Target]) -> list[Target]:
    """To a token of some projects, those that hear of one of them."""
    return [t for t in targets if t.projects is None or any(map(visible, t.projects))]
