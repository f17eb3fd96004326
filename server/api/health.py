"""Is the process alive, can it work, and what has it done."""

from __future__ import annotations

from anyio import to_thread
from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from rankscope.server import clock
from rankscope.server.api import prometheus, threads
from rankscope.server.api.deps import Database
from rankscope.server.api.problems import Problem
from rankscope.server.health import Health
from rankscope.server.storage.database import migrate
from rankscope.server.storage.database.engine import reading, touch, why

router = APIRouter(tags=["health"])

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
    """This server, and the runs of its database, in Prometheus' text format."""
    state = request.app.state
    with reading(engine) as connection:
        stored = list(prometheus.stored(connection, now=clock.now()))
    lines = [*prometheus.process(state.counters, state.admission, state.health.report()), *stored]
    return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")
