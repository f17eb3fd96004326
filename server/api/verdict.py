"""`GET /runs/{run}/verdict`: pass, fail or pending, and why."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from fastapi import APIRouter, Query

from rankscope.server import clock, detectors
from rankscope.server.alerts.verdict import Verdict, least_sampled, not_seen
from rankscope.server.api import models
from rankscope.server.api.deps import Database, RunId, known_run
from rankscope.server.api.problems import Problem
from rankscope.server.detectors.settings import ENABLED, Effective
from rankscope.server.evaluation.sort_keys import verdict_of
from rankscope.server.storage.database.engine import reading
from rankscope.server.storage.ingest import agents
from rankscope.server.storage.judgement import detector_settings
from rankscope.server.storage.judgement.alerts import Findings, findings
from rankscope.server.storage.reading import runs

router = APIRouter(tags=["verdict"])

# Where an evaluation takes longer, something is wrong with it.
_PATIENCE_S = 60.0

Kinds = Annotated[list[str] | None, Query()]


@router.get("/runs/{run}/verdict")
def get_verdict(
    engine: Database,
    run: RunId,
    fail_on: Literal["warning", "critical"] = "warning",
    kind: Kinds = None,
    ignore: Kinds = None,
) -> models.Verdict:
    """Whether a run is healthy, with every check that was or was not made.

    Where its processes train further models, each in a run of its own (`RUN.2`), it passes only if
    those do, by the same options.
    """
    for name, kinds in (("kind", kind), ("ignore", ignore)):
        known = detectors.installed().kinds
        if unknown := sorted(set(kinds or ()) - set(known)):
            raise Problem(422, f"{name}: {', '.join(unknown)}: is none of {', '.join(known)}")
    with reading(engine) as connection:
        row = known_run(connection, run)
        beside = runs.list_beside(connection, row)
        judged = {one.key: one.id for one in (row, *beside)}
        every = findings(connection, runs=judged, now=time.time())
        kept = detector_settings.load_run(connection, run=row.key)
        plans = agents.sampling(connection, run=row.key)
    judged_by = None if kept is None else Effective.from_json(kept)
    options: dict[str, Any] = {
        "fail_on": fail_on,
        "kinds": frozenset(kind or ()),
        "ignored": frozenset(ignore or ()),
    }
    found = every[row.key]
    verdict = verdict_of(row.state, row, found, **options)
    others = {one.id: verdict_of(one.state, one, every[one.key], **options) for one in beside}
    names = [_name(verdict, row), *(_name(others[one.id], one) for one in beside)]
    unevaluated = [reason for one in (row, *beside) for reason in _unevaluated(one)]
    sampled = least_sampled([plan.sampled for plan in plans.values()])
    farthest = max((plan.intervals.get("full", 1) for plan in plans.values()), default=1)
    so_far = [
        verdict_of(
            "finished" if one.state == "running" else one.state, one, every[one.key], **options
        )
        for one in (row, *beside)
    ]
    return models.Verdict(
        verdict=_worst(names),
        so_far=_worst([one.verdict for one in so_far]),
        reasons=[*verdict.reasons, *_of_others(others), *unevaluated],
        checks=[
            models.CheckLine.model_validate({"name": c.name, "state": c.state, "why": c.why})
            for c in verdict.checks
        ],
        required=[
            models.Requirement(name=r.name, state=cast(Any, r.state), by=r.by or None, why=r.why)
            for r in verdict.required
        ],
        state=row.state,
        evaluated=not unevaluated,
        sampled=sampled,
        not_seen=not_seen(verdict.checks, sampled=sampled, interval=farthest),
        settings=_settings(row, judged_by),
        first_start=row.first_start,
        start=row.start,
        resumed_step=row.resumed_step,
    )


def _worst(verdicts: Sequence[str]) -> models.VerdictName:
    """Of several runs together."""
    return cast(models.VerdictName, min(verdicts, key=("fail", "pending", "pass").index))


def _of_others(verdicts: Mapping[str, Verdict]) -> list[str]:
    """Why runs beside the one that was asked for do not pass."""
    return [
        f"run {run}, of a further model in the same processes: {reason}"
        for run, verdict in verdicts.items()
        if verdict.verdict != "pass"
        for reason in verdict.reasons
    ]


def _settings(row: Any, judged_by: Effective | None) -> models.VerdictSettings:
    """What is not as the detectors declare it."""
    declared = row.config.get("profile")
    if judged_by is None:
        return models.VerdictSettings(profile=declared, off=[], thresholds={})
    changed = {
        kind: {name: judged_by.values[kind][name] for name in names if name != ENABLED}
        for kind, names in judged_by.sources.items()
    }
    return models.VerdictSettings(
        profile=declared or judged_by.profile,
        off=sorted(judged_by.off),
        thresholds={kind: values for kind, values in changed.items() if values},
    )


def summary(row: Any, found: Findings) -> models.VerdictName:
    """The verdict alone, for lists."""
    return _name(verdict_of(row.state, row, found), row)


def _unevaluated(row: Any) -> list[str]:
    """A reason to wait: data that no detector has seen yet."""
    if row.evaluated >= row.arrivals:
        return []
    waiting = clock.now() - row.last_seen_at
    if waiting < _PATIENCE_S:
        return ["the newest data have not been evaluated yet; ask again in a second"]
    return [
        f"the newest data have not been evaluated for {waiting / 60:.0f} min: the server is "
        "behind, or cannot; then its log says why"
    ]


def _name(verdict: Verdict, row: Any) -> models.VerdictName:
    if verdict.verdict == "pass" and _unevaluated(row):
        return "pending"
    return cast(models.VerdictName, verdict.verdict)
