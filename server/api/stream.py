"""`GET /runs/{run}/stream`: server-sent events for an open page."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request
from sqlalchemy import Engine
from sse_starlette.sse import EventSourceResponse

from rankscope.server.api import threads
from rankscope.server.api.deps import Database, RunId, known_run
from rankscope.server.api.guard import TOKEN, Guard
from rankscope.server.storage.database.engine import reading
from rankscope.server.storage.judgement import alerts

router = APIRouter(tags=["stream"])

# Pages are notified at most this often.
_INTERVAL_S = 0.5
# How soon run events are noticed, and how long the database is not asked while there are none: what
# another program does to it is not announced.
_GLANCE_S = 0.05
_RECHECK_SECONDS = 3.0


@router.get("/runs/{run}/stream", response_class=EventSourceResponse)
async def stream(request: Request, engine: Database, run: RunId) -> EventSourceResponse:
    """Run events of a run: `points` (new points), `alert` (one opened or changed), `state`."""
    first = await _read(request, engine, run)
    return EventSourceResponse(_changes(request, engine, run, first), ping=15)


async def _changes(
    request: Request, engine: Engine, run: str, reported: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    yield {"event": "state", "data": json.dumps(reported["state"])}
    run_events = request.app.state.run_events
    guard: Guard = request.app.state.guard
    token = request.scope.get(TOKEN)
    number = None
    while not await request.is_disconnected():
        await asyncio.sleep(_INTERVAL_S)
        recheck_at = time.monotonic() + _RECHECK_SECONDS
        while run_events.number(run) == number and time.monotonic() < recheck_at:
            if run_events.stopping.is_set():
                break
            await asyncio.sleep(_GLANCE_S)
        if run_events.stopping.is_set():
            return
        # Who has lost the right to ask hears no more.
        if token is not None and not await guard.holds(token):
            return
        # Before it is examined: what happens meanwhile counts as new.
        number = run_events.number(run)
        now = await _read(request, engine, run)
        for event in ("state", "points"):
            if now[event] != reported[event]:
                yield {"event": event, "data": json.dumps(now[event])}
        for alert_id, facts in now["alerts"].items():
            if reported["alerts"].get(alert_id) != facts:
                yield {"event": "alert", "data": json.dumps({"id": alert_id, **facts})}
        reported = now


async def _read(request: Request, engine: Engine, run: str) -> dict[str, Any]:
    # An open page hears of an alert although others ask for much.
    thread = threads.own(request.app.state, "stream", 1)
    return await to_thread.run_sync(_read_state, engine, run, limiter=thread)


def _read_state(engine: Engine, run: str) -> dict[str, Any]:
    with reading(engine) as connection:
        row = known_run(connection, run)
        found = alerts.roots(connection, run=row.key, run_id=run)
        now = time.time()
        known = alerts.acknowledgements(connection, alert_ids=[a.id for a in found], now=now)
        silences = alerts.longest(alerts.silences(connection, run=row.key, now=now))
    return {
        "state": {"state": row.state, "world_size": row.world_size},
        "points": {"last_step": row.last_step, "batches": row.arrivals},
        "alerts": {
            a.id: {
                "kind": a.kind,
                "severity": a.severity,
                "state": a.state,
                "title": a.title,
                "last_step": a.last_step,
                "acknowledged": a.id in known,
                # By its id: one that ends and another that begins between two reads is a change.
                "silence": silences[run, a.kind].id if (run, a.kind) in silences else None,
            }
            for a in found
        },
    }
