"""Is the process alive, can it work, and what has it done."""

from __future__ import annotations

from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from rankscope.server.api import threads
from rankscope.server.api.admission import Admission
from rankscope.server.api.deps import Database
from rankscope.server.api.problems import Problem
from rankscope.server.health import Health
from rankscope.server.storage.database import migrate
from rankscope.server.storage.database.engine import reading, touch, why
from rankscope.server.storage.reading import statistics

router = APIRouter(tags=["health"])

_WORK = ("evaluation", "compaction")
# After which nobody posts, or what they post is stored.
_CALM_SECONDS = 10.0


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process answers; says nothing of the database."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(request: Request, engine: Database) -> dict[str, str]:
    """The database answers, takes what is written, has the right schema, and all threads are there.

    One that has ended unexpectedly is started again; the server is not ready until then. Whether
    the database takes anything is tried where the last batches could not be stored.
    """
    # Whoever takes a server out of service for no answer does not mean that many pages are open.
    thread = threads.own(request.app.state, "health", 1)
    await to_thread.run_sync(_check, engine, request.app.state.health, limiter=thread)
    return {"status": "ready"}


def _check(engine: Engine, state: Health) -> None:
    try:
        have = migrate.current(engine)
    except SQLAlchemyError as error:
        raise Problem(503, f"the database does not answer: {error.__class__.__name__}") from error
    if have != migrate.head():
        raise Problem(
            503, f"the database has schema {have}, not {migrate.head()}: rankscope db upgrade"
        )
    if state.unwritable:
        try:
            touch(engine)
        except SQLAlchemyError as error:
            raise Problem(503, f"the database takes nothing: {why(error)}") from error
        # A full disk may have room for a row, and none for a batch: the next batches show it.
        if state.seconds_since_refused < _CALM_SECONDS:
            raise Problem(503, f"the database takes nothing: {state.unwritable}")
        state.wrote()
    missing = state.report()["missing"]
    if missing:
        what = "; ".join(f"{name}: {why}" for name, why in sorted(missing.items()))
        raise Problem(
            503, f"part of the server has ended and is started again: {what}", missing=[*missing]
        )


@router.get("/metrics", response_class=PlainTextResponse)
def metrics(request: Request, engine: Database) -> PlainTextResponse:
    """This server in Prometheus' text format."""
    counters = request.app.state.counters
    admission: Admission = request.app.state.admission
    with reading(engine) as connection:
        unevaluated = statistics.unevaluated(connection)
        runs = statistics.runs_by_state(connection)
        alerts = statistics.open_alerts(connection)
    lines = [
        *_metric("batches_total", "counter", "Batches taken.", counters.batches),
        *_metric("points_total", "counter", "Points stored.", counters.points),
        *_metric("duplicates_total", "counter", "Batches that were there.", counters.duplicates),
        *_metric("refused_total", "counter", "Batches that were refused.", counters.refused),
        *_metric(
            "busy_total", "counter", "Batches sent away for a while (429).", admission.refused
        ),
        *_metric("under_way", "gauge", "Batches that are being stored.", admission.under_way),
        *_metric("waiting", "gauge", "Batches that wait for their turn.", admission.waiting),
        *_health(request.app.state.health.report()),
        *_metric("unevaluated_runs", "gauge", "Runs with new data.", unevaluated),
        "# HELP rankscope_runs Runs by state.",
        "# TYPE rankscope_runs gauge",
        *(f'rankscope_runs{{state="{state}"}} {count}' for state, count in runs.items()),
        "# HELP rankscope_alerts_open Open alerts by severity.",
        "# TYPE rankscope_alerts_open gauge",
        *(
            f'rankscope_alerts_open{{severity="{severity}"}} {count}'
            for severity, count in alerts.items()
        ),
    ]
    return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


def _health(report: dict[str, Any]) -> list[str]:
    counts = report["counts"]
    lines = [
        "# HELP rankscope_failures_total Work on single runs that failed; the others went on.",
        "# TYPE rankscope_failures_total counter",
    ]
    for work in _WORK:
        count = counts.get(f"{work}_failures", 0)
        lines.append(f'rankscope_failures_total{{work="{work}"}} {count}')
    lines += [
        "# HELP rankscope_failing_runs Runs whose last attempt at this work failed.",
        "# TYPE rankscope_failing_runs gauge",
    ]
    for work in _WORK:
        lines.append(f'rankscope_failing_runs{{work="{work}"}} {report["failing"].get(work, 0)}')
    restarts = counts.get("background_restarts", 0)
    text = "Threads and processes that ended unexpectedly and were started again."
    gone = "Runs that were deleted for their age, or their project's size."
    told = "Messages about alerts that their targets took."
    unsent = "Exports of metrics by OTLP that were not taken."
    untold = "Messages about alerts that could not be delivered; they are tried again."
    return [
        *lines,
        *_metric("background_restarts_total", "counter", text, restarts),
        *_metric("pruned_runs_total", "counter", gone, counts.get("pruned_runs", 0)),
        *_metric("otlp_failures_total", "counter", unsent, counts.get("otlp_failures", 0)),
        *_metric("notifications_total", "counter", told, counts.get("notifications", 0)),
        *_metric(
            "notification_failures_total", "counter", untold, counts.get("notification_failures", 0)
        ),
    ]


def _metric(name: str, kind: str, text: str, value: int) -> list[str]:
    full = f"rankscope_{name}"
    return [f"# HELP {full} {text}", f"# TYPE {full} {kind}", f"{full} {value}"]
