"""`GET /runs/{run}/verdict`: pass, fail or pending, and why."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

from fastapi import APIRouter, Query
from sqlalchemy import Connection

from rankscope.agent.wire import KINDS
from rankscope.server.alerts.model import Alert
from rankscope.server.api import models
from rankscope.server.api.deps import Reading, RunRow
from rankscope.server.api.problems import Problem
from rankscope.server.storage import alerts, evaluation
from rankscope.server.verdict import Verdict, judge

router = APIRouter(tags=["verdict"])

Kinds = Annotated[list[str] | None, Query()]


@router.get("/runs/{run}/verdict")
def get_verdict(
    connection: Reading,
    row: RunRow,
    fail_on: Literal["warning", "critical"] = "warning",
    kind: Kinds = None,
    ignore: Kinds = None,
) -> models.Verdict:
    """Whether a run is healthy, with every check that was or was not made."""
    for name, kinds in (("kind", kind), ("ignore", ignore)):
        if unknown := sorted(set(kinds or ()) - set(KINDS)):
            raise Problem(422, f"{name}: {', '.join(unknown)}: is none of {', '.join(KINDS)}")
    verdict = judge(
        row.state,
        row.world_size,
        evaluation.load_alerts(connection, run=row.key),
        alerts.load_checks(connection, run=row.key),
        silenced=alerts.silenced_kinds(connection, run=row.key, now=time.time()),
        fail_on=fail_on,
        kinds=frozenset(kind or ()),
        ignored=frozenset(ignore or ()),
    )
    pending = _unevaluated(row)
    return models.Verdict(
        verdict="pending" if pending and verdict.verdict == "pass" else _name(verdict),
        reasons=[*verdict.reasons, *pending],
        checks=[
            models.CheckLine.model_validate({"name": c.name, "state": c.state, "why": c.why})
            for c in verdict.checks
        ],
    )


def _unevaluated(row: Any) -> list[str]:
    """A reason to wait: data that no detector has seen yet."""
    if row.evaluated >= row.arrivals:
        return []
    return ["the newest data have not been evaluated yet; ask again in a second"]


def summary(
    connection: Connection, row: Any, found: Sequence[Alert], *, now: float
) -> models.VerdictName:
    """The verdict alone, for lists.

    Args:
        found: all alerts of the run.
    """
    verdict = judge(
        row.state,
        row.world_size,
        found,
        alerts.load_checks(connection, run=row.key),
        silenced=alerts.silenced_kinds(connection, run=row.key, now=now),
    )
    name = _name(verdict)
    return "pending" if name == "pass" and _unevaluated(row) else name


def _name(verdict: Verdict) -> models.VerdictName:
    return cast(models.VerdictName, verdict.verdict)
