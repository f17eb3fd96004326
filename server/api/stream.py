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

from rankscope.server.api.deps import Database
from rankscope.server.api.problems import Problem
from rankscope.server.storage import alerts, runs

router = APIRouter(tags=["stream"])

# Pages are told at most this often; between two looks nothing is asked of the database.
_INTERVAL_S = 0.5


@router.get("/runs/{run}/stream", response_class=EventSourceResponse)
async def stream(request: Request, engine: Database, run: str) -> EventSourceResponse:
    """News of a run: `points` (new points), `alert` (one opened or changed), `state`."""
    # Not by the dependency that other routes use: its transaction would last as long as the stream.
    if (await run_in_threadpool(_look, engine, run))["state"] == {"state": "deleted"}:
        raise Problem(404, f"there is no run {run!r}; GET /api/v1/runs lists the runs there are")
    return EventSourceResponse(_news(request, engine, run), ping=15)


async def _news(request: Request, engine: Engine, run: str) -> AsyncIterator[dict[str, Any]]:
    told = await run_in_threadpool(_look, engine, run)
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
    with engine.connect() as connection, connection.begin():
        row = runs.find_run(connection, run)
        if row is None:
            return {"state": {"state": "deleted"}, "points": {}, "alerts": {}}
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
