"""Is the process alive, can it work, and what has it done."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from sqlalchemy.exc import SQLAlchemyError

from rankscope.server.api.deps import Database
from rankscope.server.api.problems import Problem
from rankscope.server.storage import migrate, statistics
from rankscope.server.storage.engine import reading

router = APIRouter(tags=["health"])


@router.get("/healthz")
def healthz() -> dict[str, str]:
    """The process answers; says nothing of the database."""
    return {"status": "ok"}


@router.get("/readyz")
def readyz(engine: Database) -> dict[str, str]:
    """The database answers and has the schema that this server works with."""
    try:
        have = migrate.current(engine)
    except SQLAlchemyError as error:
        raise Problem(503, f"the database does not answer: {error.__class__.__name__}") from error
    if have != migrate.head():
        raise Problem(
            503, f"the database has schema {have}, not {migrate.head()}: rankscope db upgrade"
        )
    return {"status": "ready"}


@router.get("/metrics", response_class=PlainTextResponse)
def metrics(request: Request, engine: Database) -> PlainTextResponse:
    """This server in Prometheus' text format."""
    counters = request.app.state.counters
    with reading(engine) as connection:
        unevaluated = statistics.unevaluated(connection)
        runs = statistics.runs_by_state(connection)
        alerts = statistics.open_alerts(connection)
    lines = [
        *_metric("batches_total", "counter", "Batches taken.", counters.batches),
        *_metric("points_total", "counter", "Points stored.", counters.points),
        *_metric("duplicates_total", "counter", "Batches that were there.", counters.duplicates),
        *_metric("refused_total", "counter", "Batches that were refused.", counters.refused),
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


def _metric(name: str, kind: str, text: str, value: int) -> list[str]:
    full = f"rankscope_{name}"
    return [f"# HELP {full} {text}", f"# TYPE {full} {kind}", f"{full} {value}"]
