"""`GET /runs/{run}/divergence`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Depends, Query

from rankscope.agent.wire import STAGES
from rankscope.server.api import models
from rankscope.server.api.deps import (
    Database,
    Page,
    RunId,
    Step,
    known_run,
    next_cursor,
    paging,
)
from rankscope.server.api.problems import Problem
from rankscope.server.comparison.compare import pairwise_distances
from rankscope.server.storage.database.engine import reading
from rankscope.server.storage.judgement import comparisons
from rankscope.server.window import Comparison, FingerprintPart, TensorDifference

router = APIRouter(tags=["divergence"])

Paging = Annotated[Page, Depends(paging(int, str))]


@router.get("/runs/{run}/divergence")
def get_divergence(
    engine: Database,
    run: RunId,
    page: Paging,
    from_step: Step = None,
    to_step: Step = None,
    stage: str | None = None,
    matrix: Annotated[
        bool, Query(description="with the distances of all pairs at the last sampled step")
    ] = False,
) -> models.Divergence:
    """How the ranks compared at each checked step; equal neighbours are reported once."""
    if stage is not None and stage not in STAGES:
        raise Problem(422, f"stage: {stage!r} is none of {', '.join(STAGES)}")
    bounds = {"from_step": from_step, "to_step": to_step}
    with reading(engine) as connection:
        key = known_run(connection, run).key
        found, after = comparisons.list_comparisons(
            connection, run=key, limit=page.limit, after=page.after, stage=stage, **bounds
        )
        fingerprints = []
        if matrix:
            chosen = stage or "parameters"
            fingerprints = comparisons.sampled_fingerprints(
                connection, run=key, stage=chosen, **bounds
            )
    return models.Divergence(
        items=[_comparison(s) for s in found],
        next_cursor=next_cursor(after),
        matrix=_matrix(fingerprints),
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
        table=difference.table,
    )


def _matrix(parts: Sequence[FingerprintPart]) -> models.Matrix | None:
    sketches = [p.fingerprint.sketches for p in parts if p.fingerprint.sketches is not None]
    if not sketches or len({s.shape for s in sketches}) > 1:
        return None
    return models.Matrix(
        step=parts[0].fingerprint.step,
        stage=parts[0].fingerprint.stage,
        ranks=[p.rank for p in parts],
        distance=pairwise_distances(np.stack(sketches)).tolist(),
    )
