"""Alerts: lists, one with its history, acknowledge, silence."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query
from sqlalchemy import Connection, Engine

from rankscope.agent import wire
from rankscope.server import detectors
from rankscope.server.alerts.fields import alert_fields
from rankscope.server.api import alert_models, models
from rankscope.server.api.alert_context import context_of
from rankscope.server.api.deps import By, Database, Page, RunId, known_run, next_cursor, paging
from rankscope.server.api.notifications import log_entries
from rankscope.server.api.problems import Problem
from rankscope.server.storage.access import audit
from rankscope.server.storage.database.engine import reading, writing
from rankscope.server.storage.judgement import alerts
from rankscope.server.storage.reading import runs
from rankscope.server.window import Alert

router = APIRouter(tags=["alerts"])

# Later ones, rounded to a float or brought to UTC, have no date any more.
_LATEST = datetime(9999, 1, 1, tzinfo=UTC).timestamp()

# Longer ones than a person writes cost the database time.
_MAX_SEARCH = 200
_MAX_KIND = 64
# Of an alert: one for each target.
_MAX_NOTIFICATIONS = 500

Paging = Annotated[Page, Depends(paging(float, str))]


@dataclass(frozen=True, slots=True)
class Filter:
    """Which alerts a list has; members as `storage.alerts.list_alerts` takes them."""

    state: str | None = None
    severity: str | None = None
    kind: str | None = None
    rank: int | None = None
    search: str | None = None
    consequences: bool = False


def _filter(
    state: Annotated[Literal["open", "resolved"] | None, Query()] = None,
    severity: Annotated[models.Severity | None, Query()] = None,
    kind: Annotated[
        str | None,
        Query(
            description="a kind, or a pattern such as `desync.*`",
            pattern=r"^[a-z0-9_.*?]+$",
            max_length=_MAX_KIND,
        ),
    ] = None,
    rank: Annotated[
        int | None, Query(description="a suspect rank", ge=0, le=wire.limits.RANK.most)
    ] = None,
    q: Annotated[
        str | None,
        Query(
            description="words, each in the kind, the title, the run or the name of a tensor",
            max_length=_MAX_SEARCH,
        ),
    ] = None,
    consequences: Annotated[
        bool, Query(description="list alerts that follow from others as well, not only root causes")
    ] = False,
) -> Filter:
    if q is not None and "\0" in q:
        raise Problem(422, "q: has a NUL in it, which no name and no title has")
    return Filter(state, severity, kind, rank, q, consequences)


Wanted = Annotated[Filter, Depends(_filter)]
Beside = Annotated[
    bool,
    Query(
        description="list alerts of further models as well that the run's processes train, each in "
        "a run of its own (`RUN.2`): the verdict of the run counts them"
    ),
]


@router.get("/runs/{run}/alerts")
def run_alerts(
    engine: Database, run: RunId, page: Paging, wanted: Wanted, beside: Beside = False
) -> models.Items[alert_models.Alert]:
    """Alerts of a run, newest first."""
    return _list(engine, page, wanted, run=run, beside=beside)


@router.get("/alerts")
def all_alerts(
    engine: Database, page: Paging, wanted: Wanted, project: str | None = None
) -> models.Items[alert_models.Alert]:
    """Alerts of all runs, newest first."""
    return _list(engine, page, wanted, project=project)


@router.get("/alerts/{alert}")
def get_alert(engine: Database, alert: str) -> alert_models.AlertDetail:
    """One alert with all its evidence, what happened to it, and who was told of it."""
    with reading(engine) as connection:
        return _detail(connection, alert)


@router.get("/alerts/{alert}/context")
def alert_context(engine: Database, alert: str) -> alert_models.AlertContext:
    """The last console lines of the ranks, what was not committed, and the run's settings.

    Lines and difference are there where `attach` has the options `console` and `git_diff`.
    """
    with reading(engine) as connection:
        key, about = _known(connection, alert)
        row = known_run(connection, about.run)
        return context_of(connection, key, about.first_step, row.config)


@router.post("/alerts/{alert}/acknowledge")
def acknowledge(
    engine: Database, alert: str, by: By, request: alert_models.AcknowledgeRequest | None = None
) -> alert_models.AlertDetail:
    """Records for everybody that somebody has seen the alert, and in place of what was said before.

    It changes nothing about the verdict.
    """
    said = request or alert_models.AcknowledgeRequest()
    now = time.time()
    given = alerts.Acknowledgement(said.name, said.reason, now, _until(said, now))
    with writing(engine) as connection:
        key, about = _known(connection, alert)
        alerts.acknowledge(connection, run=key, alert_id=alert, given=given)
        details = {"run": about.run, "kind": about.kind, **_said(given)}
        audit.record(connection, by, "alert.acknowledge", alert, details)
        return _detail(connection, alert)


@router.delete("/alerts/{alert}/acknowledge")
def withdraw_acknowledgement(engine: Database, alert: str, by: By) -> alert_models.AlertDetail:
    """Takes an acknowledgement back."""
    with writing(engine) as connection:
        key, about = _known(connection, alert)
        alerts.acknowledge(connection, run=key, alert_id=alert, given=None)
        details = {"run": about.run, "kind": about.kind}
        audit.record(connection, by, "alert.unacknowledge", alert, details)
        return _detail(connection, alert)


@router.get("/runs/{run}/silences")
def run_silences(engine: Database, run: RunId) -> models.Items[alert_models.Silence]:
    """The silences that hold in a run now, oldest first; all on one page."""
    with reading(engine) as connection:
        key = known_run(connection, run).key
        held = alerts.silences(connection, run=key, now=time.time())
    return models.Items(items=[_silence(s) for s in held], next_cursor=None)


@router.delete("/silences/{silence}", status_code=204)
def end_silence(engine: Database, silence: str, by: By) -> None:
    """Ends a silence: what it kept out of the verdict counts again."""
    with writing(engine) as connection:
        if not alerts.delete_silence(connection, silence):
            raise Problem(
                404,
                f"there is no silence {silence!r}; GET /api/v1/runs/{{run}}/silences lists them",
            )
        audit.record(connection, by, "silence.end", silence, {})


@router.post("/runs/{run}/silences", status_code=201)
def silence(
    engine: Database, run: RunId, request: alert_models.SilenceRequest, by: By
) -> alert_models.Silence:
    """Takes a kind out of the verdict of a run, for ever, until a time or for some seconds."""
    known = detectors.installed().kinds
    if request.kind not in known:
        raise Problem(422, f"kind: {request.kind!r} is none of {', '.join(known)}")
    now = time.time()
    added = alerts.Silence(
        id=alerts.new_silence_id(),
        run=run,
        kind=request.kind,
        created_at=now,
        until=_until(request, now),
        name=request.name,
        reason=request.reason,
    )
    with writing(engine) as connection:
        alerts.add_silence(connection, run=known_run(connection, run).key, silence=added)
        details = {"run": run, "kind": added.kind, **_said(added)}
        audit.record(connection, by, "silence.create", added.id, details)
    return _silence(added)


def _said(given: alerts.Acknowledgement | alerts.Silence) -> dict[str, str | None]:
    """What somebody says of themselves and why, for the audit log; until when, None for ever."""
    until = None if given.until is None else models.time_of(given.until).isoformat()
    return {"name": given.name, "reason": given.reason, "until": until}


def _until(request: alert_models.AcknowledgeRequest, now: float) -> float | None:
    """The end that was asked for, seconds since 1970; None: for ever."""
    if request.until is not None and request.seconds is not None:
        raise Problem(422, "until, seconds: say the end in one way, not in both")
    if request.seconds is not None:
        if not 0 < request.seconds < 1e10:
            raise Problem(422, "seconds: must be above 0; leave it out for an end that never comes")
        return now + request.seconds
    if request.until is None:
        return None
    until = request.until.timestamp()
    if until <= now:
        raise Problem(422, f"until: {request.until.isoformat()} is past")
    if until >= _LATEST:
        raise Problem(422, "until: too far away; leave it out for an end that never comes")
    return until


def _list(
    engine: Engine,
    page: Page,
    wanted: Filter,
    *,
    run: str | None = None,
    beside: bool = False,
    project: str | None = None,
) -> models.Items[alert_models.Alert]:
    with reading(engine) as connection:
        row = None if run is None else known_run(connection, run)
        key = None if row is None else row.key
        further = () if row is None or not beside else runs.list_beside(connection, row)
        _check_kind(connection, wanted.kind)
        found, after = alerts.list_alerts(
            connection,
            limit=page.limit,
            after=page.after,
            run=key,
            beside=[one.key for one in further],
            project=project,
            **asdict(wanted),
        )
        told = _told(connection, found, run=None if further else key)
    return models.Items(
        items=[alert_models.Alert(**_members(a), **told[a.id]) for a in found],
        next_cursor=next_cursor(after),
    )


def _check_kind(connection: Connection, kind: str | None) -> None:
    """Refuses a kind that is none: an empty list would read as "nothing was found".

    One that no detector has any more is known by its alerts.
    """
    known = detectors.installed().kinds
    if kind is None or kind in known or any(fnmatchcase(k, kind) for k in known):
        return
    if not alerts.has_kind(connection, kind):
        close = get_close_matches(kind, known, 1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; the kinds are {', '.join(known)}"
        raise Problem(422, f"kind: there is no {kind!r}{hint}")


def _known(connection: Connection, alert: str) -> tuple[int, Alert]:
    found = alerts.get_alert(connection, alert)
    if found is None:
        raise Problem(404, f"there is no alert {alert!r}; GET /api/v1/alerts lists them")
    return found


def _detail(connection: Connection, alert: str) -> alert_models.AlertDetail:
    key, found = _known(connection, alert)
    history = alerts.alert_history(connection, run=key, alert_id=alert)
    return alert_models.AlertDetail(
        **_members(found),
        **_told(connection, [found], run=key)[found.id],
        notifications=log_entries(
            connection, limit=_MAX_NOTIFICATIONS, run=key, alert=alert, pending=False
        ),
        history=[alert_models.Transition(**(h | {"at": models.time_of(h["at"])})) for h in history],
    )


def _silence(silence: alerts.Silence) -> alert_models.Silence:
    return alert_models.Silence(
        id=silence.id,
        run=silence.run,
        kind=silence.kind,
        name=silence.name,
        reason=silence.reason,
        created_at=models.time_of(silence.created_at),
        until=_time(silence.until),
    )


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else models.time_of(seconds)


def _told(
    connection: Connection, found: Sequence[Alert], *, run: int | None
) -> dict[str, dict[str, Any]]:
    """Of each alert, by id, what people said about it that holds now: members of its JSON."""
    now = time.time()
    silences = alerts.longest(alerts.silences(connection, run=run, now=now))
    known = alerts.acknowledgements(connection, alert_ids=[a.id for a in found], now=now)

    def members(alert: Alert) -> dict[str, Any]:
        silence, by = silences.get((alert.run, alert.kind)), known.get(alert.id)
        return {
            "silenced": silence is not None,
            "silence": None if silence is None else _silence(silence),
            "acknowledged": by is not None,
            "acknowledgement": None
            if by is None
            else alert_models.Acknowledgement(
                name=by.name, reason=by.reason, at=_time(by.at), until=_time(by.until)
            ),
        }

    return {alert.id: members(alert) for alert in found}


def _members(alert: Alert) -> dict[str, Any]:
    return alert_fields(alert) | {
        "opened_at": models.time_of(alert.opened_at),
        "resolved_at": _time(alert.resolved_at),
    }
