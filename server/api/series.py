"""`GET /runs/{run}/metrics`, `GET /runs/{run}/series`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse

from rankscope.agent.wire import numbers_to_json
from rankscope.server.api.deps import MAX_RANK, Database, RunId, Step, known_run
from rankscope.server.api.models import Items, Metric, Series
from rankscope.server.storage import series
from rankscope.server.storage.engine import reading

router = APIRouter(tags=["series"])

Rank = Annotated[int, Query(ge=0, le=MAX_RANK)]


@router.get("/runs/{run}/metrics")
def list_metrics(engine: Database, run: RunId) -> Items[Metric]:
    """Names of the series that a run has, with their ranks and steps."""
    with reading(engine) as connection:
        found = series.list_metrics(connection, run=known_run(connection, run).key)
    return Items(
        items=[
            Metric(name=m.name, ranks=list(m.ranks), first_step=m.first_step, last_step=m.last_step)
            for m in found
        ]
    )


@router.get("/runs/{run}/series", response_model=Series)
def get_series(
    engine: Database,
    run: RunId,
    metric: str,
    rank: Annotated[list[Rank] | None, Query(description="all ranks where none is given")] = None,
    from_step: Step = None,
    to_step: Step = None,
    max_points: Annotated[int, Query(ge=2, le=100_000)] = 2000,
) -> JSONResponse:
    """One metric of some ranks: raw points where they fit, else buckets that hide no spike."""
    with reading(engine) as connection:
        found = series.read_series(
            connection,
            run=known_run(connection, run).key,
            metric=metric,
            ranks=rank,
            from_step=from_step,
            to_step=to_step,
            max_points=max_points,
        )
    # Not through the model: the arrays are ours, and there may be a million numbers in them.
    return JSONResponse(
        {
            "metric": metric,
            "series": [
                {
                    "rank": s.rank,
                    "steps": s.steps.tolist(),
                    "values": numbers_to_json(s.values),
                    "min": numbers_to_json(s.low),
                    "max": numbers_to_json(s.high),
                }
                for s in found
            ],
        }
    )
