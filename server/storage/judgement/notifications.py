"""Who is told of alerts, and what they have been told: an outbox with a memory.

A row for each alert and target says what was told last, and when something is to be told next. A
message is made of the alert as it then stands: what changed twice while a receiver was down is told
once, and nothing is told that no longer holds.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import Connection, and_, case, delete, func, insert, or_, select, update

from rankscope.server.storage import schema
from rankscope.server.storage.access.visibility import of_visible
from rankscope.server.storage.database import dialect

RESOLVED = "resolved"
"""What was told of an alert that is over; of one that is not, its severity."""


@dataclass(frozen=True, slots=True)
class Target:
    """Somebody who is told of alerts.

    Attributes:
        url: where, in apprise's notation or one of ours, with whatever password is in it.
        projects, kinds: of which alone; None for all. Kinds may be patterns (`desync.*`).
        severity: the least one that is told.
        created_at: seconds since 1970; alerts that opened earlier are not told.
    """

    id: str
    name: str
    url: str = field(repr=False)
    projects: tuple[str, ...] | None
    kinds: tuple[str, ...] | None
    severity: str
    created_at: float


@dataclass(frozen=True, slots=True)
class Notification:
    """What a target has been told of an alert.

    Attributes:
        told: severity that was told last, `RESOLVED`, or empty.
        told_at: seconds since 1970.
        due_at: when something is to be told next; None: nothing is.
        wanted_at: since when.
        failures: tries of it that failed, of which the last one's `error` is.
    """

    run: int
    alert: str
    target: str
    told: str = ""
    told_at: float | None = None
    due_at: float | None = None
    wanted_at: float | None = None
    failures: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of telling a target so far.

    Attributes:
        told_at: when it took something last, seconds since 1970; None: never.
        waiting: alerts that it is still to be told something of and that did not fail.
        failing: those of which the last try failed.
        failing_since: since when the newest of these waits.
        error: what came of the last try of that one.
        next_try_at: when that one is tried again; None: never.
    """

    told_at: float | None = None
    waiting: int = 0
    failing: int = 0
    failing_since: float | None = None
    error: str = ""
    next_try_at: float | None = None


def add_target(
    connection: Connection,
    *,
    name: str,
    url: str,
    projects: Sequence[str] | None,
    kinds: Sequence[str] | None,
    severity: str,
    now: float,
) -> Target:
    """A new target."""
    made = Target(
        secrets.token_hex(4),
        name,
        url,
        None if projects is None else tuple(projects),
        None if kinds is None else tuple(kinds),
        severity,
        now,
    )
    connection.execute(
        insert(schema.notification_target).values(
            id=made.id,
            name=name,
            url=url,
            projects=None if projects is None else list(projects),
            kinds=None if kinds is None else list(kinds),
            severity=severity,
            created_at=now,
        )
    )
    return made


def targets(connection: Connection) -> list[Target]:
    """All targets, the oldest first."""
    t = schema.notification_target
    return [
        Target(
            row.id,
            row.name,
            row.url,
            None if row.projects is None else tuple(row.projects),
            None if row.kinds is None else tuple(row.kinds),
            row.severity,
            row.created_at,
        )
        for row in connection.execute(select(t).order_by(t.c.created_at, t.c.id))
    ]


def outcomes(connection: Connection) -> dict[str, Outcome]:
    """What came of telling each target, by its id, of runs that may be seen."""
    n, r = schema.notification, schema.run
    fails = n.c.error != ""
    waits = and_(n.c.wanted_at.is_not(None), n.c.error == "")
    seen = select(
        n.c.target,
        func.max(n.c.told_at),
        func.sum(case((waits, 1), else_=0)),
        func.sum(case((fails, 1), else_=0)),
    )
    seen = seen.join(r, r.c.key == n.c.run).where(of_visible(r.c.project)).group_by(n.c.target)
    found = {target: Outcome(*rest) for target, *rest in connection.execute(seen)}
    for target, outcome in found.items():
        if outcome.failing:
            newest = (
                select(n.c.wanted_at, n.c.error, n.c.due_at)
                .join(r, r.c.key == n.c.run)
                .where(of_visible(r.c.project), n.c.target == target, fails)
                .order_by(func.coalesce(n.c.wanted_at, 0).desc(), n.c.alert)
                .limit(1)
            )
            since, error, again = connection.execute(newest).one()
            found[target] = replace(outcome, failing_since=since, error=error, next_try_at=again)
    return found


def remove_target(connection: Connection, target_id: str) -> bool:
    """Forgets a target and what it was told; whether there was one."""
    t, n = schema.notification_target, schema.notification
    connection.execute(delete(n).where(n.c.target == target_id))
    return connection.execute(delete(t).where(t.c.id == target_id)).rowcount > 0


def of_run(connection: Connection, *, run: int) -> dict[tuple[str, str], Notification]:
    """What was told of a run's alerts, by alert and target."""
    n = schema.notification
    rows = connection.execute(select(n).where(n.c.run == run))
    return {(row.alert, row.target): _notification(row) for row in rows}


def want(
    connection: Connection,
    wanted: Iterable[tuple[str, str]],
    *,
    run: int,
    due_at: float,
    now: float,
) -> None:
    """Something is to be told: alert and target. What is wanted already stays as it is.

    Args:
        due_at: when at the earliest, seconds since 1970.
    """
    n = schema.notification
    for alert, target in wanted:
        values = {"due_at": due_at, "wanted_at": now, "failures": 0, "error": ""}
        statement = dialect.insert(connection, n).values(
            run=run, alert=alert, target=target, told="", **values
        )
        connection.execute(
            statement.on_conflict_do_update(
                index_elements=[n.c.run, n.c.alert, n.c.target],
                set_=values,
                where=n.c.wanted_at.is_(None),
            )
        )


def due(connection: Connection, *, now: float, limit: int = 1000) -> list[Notification]:
    """What is due, the longest due first."""
    n = schema.notification
    query = select(n).where(n.c.due_at <= now).order_by(n.c.due_at).limit(limit)
    return [_notification(row) for row in connection.execute(query)]


def claim(connection: Connection, one: Notification, *, until: float) -> bool:
    """Takes what is due for oneself; False where another server was first.

    Args:
        until: when it is due again, should nobody report what came of it.
    """
    n = schema.notification
    taken = connection.execute(
        update(n).where(_is(one), n.c.due_at == one.due_at).values(due_at=until)
    )
    return taken.rowcount == 1


def told(
    connection: Connection,
    one: Notification,
    *,
    what: str,
    now: float,
    again_at: float | None = None,
) -> None:
    """Records what was told; `again_at`: when it is to be said again."""
    connection.execute(
        update(schema.notification)
        .where(_is(one))
        .values(told=what, told_at=now, due_at=again_at, wanted_at=None, failures=0, error="")
    )


def failed(
    connection: Connection, one: Notification, *, error: str, again_at: float | None
) -> None:
    """Records that it could not be told; `again_at`: when it is tried again, None: never."""
    connection.execute(
        update(schema.notification)
        .where(_is(one))
        .values(due_at=again_at, failures=one.failures + 1, error=error)
    )


def dropped(connection: Connection, some: Iterable[Notification]) -> None:
    """Nothing is to be told any more."""
    for one in some:
        connection.execute(
            update(schema.notification)
            .where(_is(one))
            .values(due_at=None, wanted_at=None, failures=0, error="")
        )


def log(
    connection: Connection,
    *,
    limit: int,
    run: int | None = None,
    alert: str | None = None,
    targets: Collection[str] | None = None,
    open_only: bool = False,
) -> list[tuple[str, str, Notification]]:
    """What was told and what is to be, the newest first.

    Args:
        run, alert, targets: of these alone.
        open_only: what waits or failed alone.

    Returns:
        Id of the run, title of the alert, and what its target was told.
    """
    n, a, r = schema.notification, schema.alert, schema.run
    query = (
        select(n, a.c.title, r.c.id.label("run_id"))
        .join(a, and_(a.c.run == n.c.run, a.c.id == n.c.alert))
        .join(r, r.c.key == n.c.run)
        .where(of_visible(r.c.project))
        .order_by(func.coalesce(n.c.told_at, n.c.wanted_at, 0).desc(), n.c.alert, n.c.target)
        .limit(limit)
    )
    if run is not None:
        query = query.where(n.c.run == run)
    if alert is not None:
        query = query.where(n.c.alert == alert)
    if targets is not None:
        query = query.where(n.c.target.in_(targets))
    if open_only:
        query = query.where(or_(n.c.wanted_at.is_not(None), n.c.error != ""))
    return [(row.run_id, row.title, _notification(row)) for row in connection.execute(query)]


def _is(one: Notification) -> Any:
    n = schema.notification
    return and_(n.c.run == one.run, n.c.alert == one.alert, n.c.target == one.target)


def _notification(row: Any) -> Notification:
    return Notification(
        row.run,
        row.alert,
        row.target,
        row.told,
        row.told_at,
        row.due_at,
        row.wanted_at,
        row.failures,
        row.error,
    )
