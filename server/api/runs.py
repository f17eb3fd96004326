"""`GET /runs`, `GET /runs/{run}`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query
from sqlalchemy import Connection

from rankscope.server.api.deps import Paging, Reading, RunRow, next_cursor
from rankscope.server.api.models import (
    AgentEvent,
    Items,
    RankStatus,
    Run,
    RunDetail,
    RunState,
    time_of,
)
from rankscope.server.api.verdict import summary
from rankscope.server.storage import evaluation, runs, series

router = APIRouter(tags=["runs"])


@router.get("/runs")
def list_runs(
    connection: Reading,
    page: Paging,
    project: str | None = None,
    state: RunState | None = None,
    q: Annotated[str | None, Query(description="text that id or project contains")] = None,
) -> Items[Run]:
    """Runs, newest first."""
    rows, after = runs.list_runs(
        connection, limit=page.limit, after=page.after, project=project, state=state, search=q
    )
    return Items(items=_runs(connection, rows), next_cursor=next_cursor(after))


@router.get("/runs/{run}")
def get_run(connection: Reading, row: RunRow) -> RunDetail:
    """A run with its ranks and what their agents said."""
    latest = series.latest_values(connection, run=row.key, metrics=("loss", "step_seconds"))
    return RunDetail(
        **_runs(connection, [row])[0].model_dump(),
        evaluated_step=row.evaluated_step,
        rank_status=[
            RankStatus(
                rank=r.rank,
                attempt=r.attempt,
                host=r.host,
                pid=r.pid,
                local_rank=r.local_rank,
                launcher=r.launcher,
                wrapper=r.wrapper,
                state=r.state,
                phase=r.phase,
                error=r.error,
                last_step=r.last_step,
                heartbeat_seconds=r.heartbeat_seconds,
                first_seen_at=time_of(r.first_seen),
                last_seen_at=time_of(r.last_seen),
                dropped=r.dropped,
                loss=latest.get((r.rank, "loss")),
                step_seconds=latest.get((r.rank, "step_seconds")),
            )
            for r in evaluation.newest_attempts(connection, run=row.key)
        ],
        events=[
            AgentEvent(**(e | {"at": time_of(e["at"])}))
            for e in runs.list_events(connection, run=row.key)
        ],
    )


def _runs(connection: Connection, rows: Sequence[Any]) -> list[Run]:
    ranks = runs.ranks_seen(connection, runs=[row.key for row in rows])
    now = time.time()
    listed = []
    for row in rows:
        found = evaluation.load_alerts(connection, run=row.key)
        listed.append(
            Run(
                id=row.id,
                project=row.project,
                name=row.id,
                state=row.state,
                world_size=row.world_size,
                ranks=list(ranks.get(row.key, ())),
                started_at=time_of(row.started_at),
                last_seen_at=time_of(row.last_seen_at),
                last_step=row.last_step,
                config=row.config,
                verdict=summary(connection, row, found, now=now),
                open_alerts=sum(a.state == "open" and a.parent is None for a in found),
            )
        )
    return listed
