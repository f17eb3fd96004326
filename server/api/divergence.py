"""`GET /runs/{run}/divergence`."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query
from sqlalchemy import Connection

from rankscope.agent.wire import STAGES
from rankscope.server.api import models
from rankscope.server.api.deps import Paging, Reading, RunRow, next_cursor
from rankscope.server.api.problems import Problem
from rankscope.server.compare import pairwise_distances
from rankscope.server.storage import comparisons
from rankscope.server.window import Comparison, TensorDifference

router = APIRouter(tags=["divergence"])

Step = Annotated[int | None, Query(ge=0)]


@router.get("/runs/{run}/divergence")
def get_divergence(
    connection: Reading,
    row: RunRow,
    page: Paging,
    from_step: Step = None,
    to_step: Step = None,
    stage: str | None = None,
    matrix: Annotated[
        bool, Query(description="with the distances of all pairs at the last sampled step")
    ] = False,
) -> models.Divergence:
    """How the ranks compared at each checked step; equal neighbours are told once."""
    if stage is not None and stage not in STAGES:
        raise Problem(422, f"stage: {stage!r} is none of {', '.join(STAGES)}")
    found, after = comparisons.list_comparisons(
        connection,
        run=row.key,
        limit=page.limit,
        after=page.after,
        stage=stage,
        from_step=from_step,
        to_step=to_step,
    )
    return models.Divergence(
        items=[_comparison(s) for s in found],
        next_cursor=next_cursor(after),
        matrix=_matrix(connection, row, stage or "parameters", from_step, to_step)
        if matrix
        else None,
    )


def clusters(comparison: Comparison) -> list[list[int]]:
    """Ranks that hold the same bits, the reference first."""
    return [
        comparison.ranks[comparison.clusters == label].tolist()
        for label in np.unique(comparison.clusters)
    ]


def _comparison(stretch: comparisons.Stretch) -> models.Comparison:
    c = stretch.comparison
    tensors = [_tensor(d) for d in c.tensors]
    return models.Comparison(
        step=c.step,
        until_step=stretch.until_step,
        count=stretch.checked,
        stage=c.stage,
        equal=c.equal,
        decided=c.decided,
        ranks=c.ranks.tolist(),
        clusters=clusters(c),
        distance=c.distance.tolist(),
        relative=c.relative.tolist(),
        first_tensor=tensors[0] if tensors else None,
        tensors=tensors,
        missing=list(c.missing),
    )


def _tensor(difference: TensorDifference) -> models.TensorDifference:
    return models.TensorDifference(
        name=difference.name,
        shape=list(difference.shape),
        ranks=list(difference.ranks),
        distance=difference.distance,
        relative=difference.relative,
        buckets=difference.buckets,
    )


def _matrix(
    connection: Connection, row: Any, stage: str, from_step: int | None, to_step: int | None
) -> models.Matrix | None:
    parts = comparisons.sampled_prints(
        connection, run=row.key, stage=stage, from_step=from_step, to_step=to_step
    )
    sketches = [p.print.sketches for p in parts if p.print.sketches is not None]
    if not sketches or len({s.shape for s in sketches}) > 1:
        return None
    return models.Matrix(
        step=parts[0].print.step,
        stage=stage,
        ranks=[p.rank for p in parts],
        distance=pairwise_distances(np.stack(sketches)).tolist(),
    )
