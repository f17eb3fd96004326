"""`GET /runs/{run}/metrics`, `GET /runs/{run}/series`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response

from rankscope.server.api.answers import (
    BINARY,
    answer,
    json_series,
    not_changed,
    pack_series,
    wants_binary,
)
from rankscope.server.api.deps import (
    MAX_RANK,
    Database,
    Page,
    RunId,
    Step,
    known_run,
    next_cursor,
    paging,
)
from rankscope.server.api.models import Metric, MetricFamily, Metrics, Series
from rankscope.server.storage.database.engine import reading
from rankscope.server.storage.reading import freshness, layers, series

router = APIRouter(tags=["series"])

# Names are short: who does not ask for less gets all there are.
Paging = Annotated[Page, Depends(paging(str, usual=100_000, most=100_000))]
Rank = Annotated[int, Query(ge=0, le=MAX_RANK)]


@router.get("/runs/{run}/metrics")
def list_metrics(
    engine: Database,
    run: RunId,
    page: Paging,
    tensors: Annotated[
        bool, Query(description="with a line for each tensor, `<metric>/<tensor>`")
    ] = True,
) -> Metrics:
    """Names of the series that a run has, with their ranks and steps."""
    with reading(engine) as connection:
        key = known_run(connection, run).key
        found = series.list_metrics(connection, run=key)
        families = layers.list_families(connection, run=key)
    lines = {
        m.name: Metric(
            name=m.name, ranks=list(m.ranks), first_step=m.first_step, last_step=m.last_step
        )
        for m in found
    }
    for family in families if tensors else ():
        ranks = list(family.ranks)
        for tensor in family.tensors:
            name = f"{family.metric}/{tensor}"
            # What somebody logged under that name is what `series` gives.
            lines.setdefault(
                name,
                Metric(
                    name=name,
                    ranks=ranks,
                    first_step=family.first_step,
                    last_step=family.last_step,
                ),
            )
    names = sorted(name for name in lines if page.after is None or name > page.after[0])
    more = len(names) > page.limit
    names = names[: page.limit]
    return Metrics(
        items=[lines[name] for name in names],
        next_cursor=next_cursor((names[-1],)) if more else None,
        families=[
            MetricFamily(
                metric=f.metric,
                table=f.table,
                tensors=list(f.tensors),
                ranks=list(f.ranks),
                first_step=f.first_step,
                last_step=f.last_step,
            )
            for f in families
        ],
    )


@router.get(
    "/runs/{run}/series",
    response_model=Series,
    responses={200: {"content": {BINARY: {}}}, 304: {"description": "as it was"}},
)
def get_series(
    request: Request,
    engine: Database,
    run: RunId,
    metric: str,
    rank: Annotated[list[Rank] | None, Query(description="all ranks where none is given")] = None,
    from_step: Step = None,
    to_step: Step = None,
    max_points: Annotated[int, Query(ge=2, le=100_000)] = 2000,
) -> Response:
    """One metric of some ranks: raw points where they fit, else buckets that hide no spike.

    With `Accept: application/msgpack` the numbers come as little-endian arrays.
    """
    binary = wants_binary(request)
    with reading(engine) as connection:
        key = known_run(connection, run).key
        newest = freshness.last_change(
            connection,
            run=key,
            ranks=rank,
            from_step=from_step,
            to_step=to_step,
            max_points=max_points,
        )
        # Weak: points that have been rolled up meanwhile are rounded as a drawing takes them.
        tag = f'W/"{key}-{newest}-{"b" if binary else "j"}"'
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if not_changed(request, tag):
            return Response(status_code=304, headers=headers)
        found = series.read_series(
            connection,
            run=key,
            metric=metric,
            ranks=rank,
            from_step=from_step,
            to_step=to_step,
            max_points=max_points,
        )
    if binary:
        return answer(request, pack_series(metric, found), BINARY, headers)
    return answer(request, json_series(metric, found), "application/json", headers)
