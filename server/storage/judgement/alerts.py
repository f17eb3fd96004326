"""Alerts, silences and checks, as the routes read and change them."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    case,
    delete,
    func,
    insert,
    or_,
    select,
    tuple_,
    update,
)

from rankscope.agent import wire
from rankscope.server.storage import schema
from rankscope.server.storage.access.visibility import of_visible
from rankscope.server.storage.database import dialect
from rankscope.server.storage.database.plain import plain
from rankscope.server.storage.judgement import sort_keys
from rankscope.server.window import Alert, Check, Status


def alert_to_row(alert: Alert, run: int) -> dict[str, Any]:
    """Column values of an alert."""
    return {
        "run": run,
        "id": alert.id,
        "kind": alert.kind,
        "key": alert.key,
        "severity": alert.severity,
        "state": alert.state,
        "title": alert.title,
        "first_step": alert.first_step,
        "seen_step": alert.seen_step,
        "last_step": alert.last_step,
        "opened_at": alert.opened_at,
        "resolved_at": alert.resolved_at,
        "acknowledged": False,
        "ranks": list(alert.ranks),
        "tensors": list(alert.tensors),
        "stage": alert.stage,
        "clear_after": alert.clear_after,
        "cause": alert.cause,
        "remedy": alert.remedy,
        "evidence": plain(alert.evidence),
        "parent": alert.parent,
        "consequences": list(alert.consequences),
        "start": alert.start,
    }


def _grade(severity: Any) -> ColumnElement[int]:
    """A severity as its place in `wire.SEVERITIES`."""
    return case({name: place for place, name in enumerate(wire.SEVERITIES)}, value=severity)


def _shown() -> ColumnElement[int]:
    """The grade that an alert is shown with: a root is as grave as the worst that follows from it.

    To be selected beside the columns of `schema.alert`.
    """
    a = schema.alert
    below = a.alias("below")
    own = _grade(a.c.severity)
    worst = (
        select(func.max(_grade(below.c.severity)))
        .where(below.c.run == a.c.run, below.c.parent == a.c.id)
        .correlate(a)
        .scalar_subquery()
    )
    return case((worst > own, worst), else_=own)


def _as_shown(row: Any, run: str) -> Alert:
    return replace(alert_from_row(row, run), severity=wire.SEVERITIES[row.shown])


def alert_from_row(row: Any, run: str) -> Alert:
    """The alert of a row; `run` is the id that users know."""
    return Alert(
        id=row.id,
        run=run,
        kind=row.kind,
        key=row.key,
        severity=row.severity,
        state=row.state,
        title=row.title,
        first_step=row.first_step,
        seen_step=row.seen_step,
        last_step=row.last_step,
        opened_at=row.opened_at,
        resolved_at=row.resolved_at,
        ranks=tuple(row.ranks),
        tensors=tuple(row.tensors),
        stage=row.stage,
        clear_after=row.clear_after,
        cause=row.cause,
        remedy=row.remedy,
        evidence=row.evidence,
        parent=row.parent,
        consequences=tuple(row.consequences),
        start=row.start,
    )


def list_alerts(
    connection: Connection,
    *,
    limit: int,
    after: tuple[float, str] | None = None,
    run: int | None = None,
    beside: Sequence[int] = (),
    project: str | None = None,
    state: str | None = None,
    severity: str | None = None,
    kind: str | None = None,
    rank: int | None = None,
    search: str | None = None,
    consequences: bool = False,
) -> tuple[list[Alert], tuple[float, str] | None]:
    """A page of alerts, newest first, and where the next one begins.

    A root has the highest severity among itself and what follows from it.

    Args:
        after: what the page before ended with: (opened_at, id).
        beside: further runs, where `run` is given.
        kind: a kind, or a pattern with `*` and `?`.
        search: words, each of which is part of the kind, the title, the id of the run or the name
            of a tensor.
        consequences: whether alerts that follow from others are listed too.
    """
    a, r = schema.alert, schema.run
    shown = _shown()
    query = (
        select(a, r.c.id.label("run_id"), shown.label("shown"))
        .join(r, r.c.key == a.c.run)
        .where(of_visible(r.c.project))
        .order_by(a.c.opened_at.desc(), a.c.id.desc())
        .limit(limit + 1)
    )
    for column, value in (
        (r.c.project, project),
        (a.c.state, state),
        (shown, None if severity is None else wire.SEVERITIES.index(severity)),
    ):
        if value is not None:
            query = query.where(column == value)
    if run is not None:
        query = query.where(a.c.run.in_((run, *beside)))
    if kind is not None:
        query = query.where(_of_kind(kind))
    if rank is not None:
        named = str(rank)
        query = query.where(dialect.any_element(connection, a.c.ranks, lambda e: e == named))
    for word in (search or "").split():
        query = query.where(_says(connection, word))
    if not consequences:
        query = query.where(a.c.parent.is_(None))
    if after is not None:
        query = query.where(tuple_(a.c.opened_at, a.c.id) < after)
    rows = connection.execute(query).all()
    more = len(rows) > limit
    rows = rows[:limit]
    next_after = (rows[-1].opened_at, rows[-1].id) if more else None
    return [_as_shown(row, row.run_id) for row in rows], next_after


def _of_kind(kind: str) -> ColumnElement[bool]:
    if "*" not in kind and "?" not in kind:
        return schema.alert.c.kind == kind
    escaped = kind.replace("/", "//").replace("_", "/_").replace("%", "/%")
    return schema.alert.c.kind.like(escaped.replace("*", "%").replace("?", "_"), escape="/")


def _says(connection: Connection, word: str) -> ColumnElement[bool]:
    """Whether a word is part of what an alert is found by, in capitals or not."""
    a, r = schema.alert, schema.run

    def has(text: ColumnElement[str]) -> ColumnElement[bool]:
        return text.icontains(word, autoescape=True)

    return or_(
        has(a.c.kind),
        has(a.c.title),
        has(r.c.id),
        dialect.any_element(connection, a.c.tensors, has),
    )


def has_kind(connection: Connection, kind: str) -> bool:
    """Whether there is an alert of a kind, or of one that fits a pattern, in any run."""
    a, r = schema.alert, schema.run
    query = select(a.c.kind).join(r, r.c.key == a.c.run).where(_of_kind(kind))
    return connection.scalar(query.where(of_visible(r.c.project)).limit(1)) is not None


def get_alert(connection: Connection, alert_id: str) -> tuple[int, Alert] | None:
    """Key of its run and the alert, by its id alone; its severity as `list_alerts` has it."""
    a, r = schema.alert, schema.run
    row = connection.execute(
        select(a, r.c.id.label("run_id"), _shown().label("shown"))
        .join(r, r.c.key == a.c.run)
        .where(a.c.id == alert_id, of_visible(r.c.project))
    ).first()
    return None if row is None else (row.run, _as_shown(row, row.run_id))


def alert_history(connection: Connection, *, run: int, alert_id: str) -> list[dict[str, Any]]:
    """What happened to an alert, oldest first: step, at (seconds since 1970), what, reason."""
    e = schema.alert_event
    rows = connection.execute(
        select(e).where(e.c.run == run, e.c.alert == alert_id).order_by(e.c.n)
    )
    return [{"step": r.step, "at": r.at, "what": r.what, "reason": r.reason} for r in rows]


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """Somebody knows of an alert.

    Attributes:
        name: who; empty where nobody said.
        at: seconds since 1970; None: by an older server, which did not note it.
        until: seconds since 1970; None: for ever.
    """

    name: str
    reason: str
    at: float | None
    until: float | None


def acknowledge(
    connection: Connection, *, run: int, alert_id: str, given: Acknowledgement | None
) -> None:
    """Marks an alert as known to a person; None takes that back."""
    a = schema.alert
    connection.execute(
        update(a)
        .where(a.c.run == run, a.c.id == alert_id)
        .values(
            acknowledged=given is not None,
            acknowledged_by="" if given is None else given.name,
            acknowledged_why="" if given is None else given.reason,
            acknowledged_at=None if given is None else given.at,
            acknowledged_until=None if given is None else given.until,
        )
    )


def acknowledgements(
    connection: Connection, *, alert_ids: Collection[str], now: float
) -> dict[str, Acknowledgement]:
    """The acknowledgements of some alerts that hold now, by the alert's id."""
    a = schema.alert
    rows = connection.execute(
        select(
            a.c.id,
            a.c.acknowledged_by,
            a.c.acknowledged_why,
            a.c.acknowledged_at,
            a.c.acknowledged_until,
        ).where(a.c.id.in_(alert_ids), a.c.acknowledged, _holds(a.c.acknowledged_until, now))
    )
    return {alert_id: Acknowledgement(*rest) for alert_id, *rest in rows}


@dataclass(frozen=True, slots=True)
class Silence:
    """A kind that does not count in a run.

    Attributes:
        run: id of the run, as users know it.
        created_at, until: seconds since 1970; None: for ever.
        name: who; empty where nobody said.
    """

    id: str
    run: str
    kind: str
    created_at: float
    until: float | None
    name: str
    reason: str


def add_silence(connection: Connection, *, run: int, silence: Silence) -> None:
    """Silences a kind in a run."""
    connection.execute(
        insert(schema.silence).values(
            run=run,
            id=silence.id,
            kind=silence.kind,
            created_at=silence.created_at,
            until=silence.until,
            name=silence.name,
            comment=silence.reason,
        )
    )
    sort_keys.ask(connection, run=run)


def new_silence_id() -> str:
    """An id that no other silence has."""
    return secrets.token_hex(8)


def silences(connection: Connection, *, now: float, run: int | None = None) -> list[Silence]:
    """What is silenced now, in one run or in all, oldest first."""
    s, r = schema.silence, schema.run
    query = (
        select(s.c.id, r.c.id, s.c.kind, s.c.created_at, s.c.until, s.c.name, s.c.comment)
        .join(r, r.c.key == s.c.run)
        .where(_holds(s.c.until, now), of_visible(r.c.project))
        .order_by(s.c.created_at, s.c.id)
    )
    if run is not None:
        query = query.where(s.c.run == run)
    return [Silence(*row) for row in connection.execute(query)]


def longest(held: Iterable[Silence]) -> dict[tuple[str, str], Silence]:
    """Of several silences of a kind in a run the one that ends last, by run and kind."""
    ends = sorted(held, key=lambda s: float("inf") if s.until is None else s.until)
    return {(s.run, s.kind): s for s in ends}


def delete_silence(connection: Connection, silence_id: str) -> bool:
    """Ends a silence; whether there was one."""
    s, r = schema.silence, schema.run
    run = connection.scalar(
        select(s.c.run)
        .join(r, r.c.key == s.c.run)
        .where(s.c.id == silence_id, of_visible(r.c.project))
    )
    if run is None:
        return False
    connection.execute(delete(s).where(s.c.run == run, s.c.id == silence_id))
    sort_keys.ask(connection, run=run)
    return True


def _holds(until: ColumnElement[float | None], now: float) -> ColumnElement[bool]:
    return or_(until.is_(None), until > now)


@dataclass(slots=True)
class Findings:
    """What a run's verdict is made of.

    Attributes:
        alerts: oldest first, consequences too.
        checks: each detector's answer, by kind.
        silenced: kinds that are silenced now.
    """

    alerts: list[Alert] = field(default_factory=list)
    checks: dict[str, Check] = field(default_factory=dict)
    silenced: set[str] = field(default_factory=set)


def findings(
    connection: Connection, *, runs: Mapping[int, str], now: float
) -> Mapping[int, Findings]:
    """What was found in some runs, by key; as many queries for a hundred as for one.

    Args:
        runs: id by key.
    """
    a, c = schema.alert, schema.check
    found = {key: Findings() for key in runs}
    by_age = (a.c.opened_at, a.c.seen_step, a.c.id)
    for row in connection.execute(select(a).where(a.c.run.in_(runs)).order_by(*by_age)):
        found[row.run].alerts.append(alert_from_row(row, runs[row.run]))
    for row in connection.execute(select(c).where(c.c.run.in_(runs)).order_by(c.c.kind)):
        found[row.run].checks[row.kind] = Check(Status(row.status), row.why)
    for key, kind in _silenced(connection, runs, now):
        found[key].silenced.add(kind)
    return found


def _silenced(connection: Connection, runs: Collection[int], now: float) -> list[tuple[int, str]]:
    s = schema.silence
    rows = connection.execute(
        select(s.c.run, s.c.kind).where(s.c.run.in_(runs), _holds(s.c.until, now))
    )
    return [(row.run, row.kind) for row in rows]


def roots(connection: Connection, *, run: int, run_id: str) -> list[Alert]:
    """The alerts of a run that are no consequences of others, oldest first.

    Their severities are as `list_alerts` has them.
    """
    a = schema.alert
    rows = connection.execute(
        select(a, _shown().label("shown"))
        .where(a.c.run == run, a.c.parent.is_(None))
        .order_by(a.c.opened_at, a.c.id)
    )
    return [_as_shown(row, run_id) for row in rows]


@dataclass(frozen=True, slots=True)
class OpenCount:
    """How many open alerts of a kind and severity a run has that follow from no other.

    Attributes:
        run: its key.
    """

    run: int
    kind: str
    severity: str
    count: int


def open_counts(connection: Connection, *, runs: Sequence[int]) -> list[OpenCount]:
    """Of these runs; severities are as `list_alerts` has them."""
    a = schema.alert
    wanted = a.c.run.in_(runs), a.c.state == "open", a.c.parent.is_(None)
    shown = select(a.c.run, a.c.kind, _shown().label("shown")).where(*wanted).subquery()
    group = shown.c.run, shown.c.kind, shown.c.shown
    rows = connection.execute(select(*group, func.count()).group_by(*group).order_by(*group))
    return [OpenCount(run, kind, wire.SEVERITIES[grade], count) for run, kind, grade, count in rows]
