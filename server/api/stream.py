"""`GET /runs/{run}/stream`: server-sent events for an open page."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Engine
from sse_starlette.sse import EventSourceResponse

from rankscope.server.api.deps import Database, RunId, known_run
from rankscope.server.storage import alerts
from rankscope.server.storage.engine import reading

router = APIRouter(tags=["stream"])

# Pages are told at most this often; between two looks nothing is asked of the database.
_INTERVAL_S = 0.5


@router.get("/runs/{run}/stream", response_class=EventSourceResponse)
async def stream(request: Request, engine: Database, run: RunId) -> EventSourceResponse:
    """News of a run: `points` (new points), `alert` (one opened or changed), `state`."""
    first = await run_in_threadpool(_look, engine, run)
    return EventSourceResponse(_news(request, engine, run, first), ping=15)


async def _news(
    request: Request, engine: Engine, run: str, told: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    yield {"event": "state", "data": json.dumps(told["state"])}
    stopping = request.app.state.news.stopping
    while not stopping.is_set() and not await request.is_disconnected():
        await asyncio.sleep(_INTERVAL_S)
        now = await run_in_threadpool(_look, engine, run)
        for event in ("state", "points"):
            if now[event] != told[event]:
                yield {"event": event, "data": json.dumps(now[event])}
        for alert_id, facts in now["alerts"].items():
            if told["alerts"].get(alert_id) != facts:
                yield {"event": "alert", "data": json.dumps({"id": alert_id, **facts})}
        told = now


def _look(engine: Engine, run: str) -> dict[str, Any]:
    with reading(engine) as connection:
        row = known_run(connection, run)
        found = alerts.roots(connection, run=row.key, run_id=run)
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
                "acknowledged": a.acknowledged,
            }
            for a in found
        },
    }
