"""`GET /runs`, `GET`, `DELETE /runs/{run}`, its `/baseline` and `/tags`, `GET /projects`."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast, get_args

from fastapi import APIRouter, Depends, Query
from sqlalchemy import Connection, Engine

from rankscope.agent import wire
from rankscope.server.alerts.lifecycle import severest
from rankscope.server.api.deps import By, Database, Page, RunId, known_run, next_cursor, paging
from rankscope.server.api.models import (
    Agent,
    AgentEvent,
    AgentFault,
    Baseline,
    Items,
    OpenAlert,
    Project,
    Run,
    RunDetail,
    RunState,
    Sampling,
    TagChanges,
    Tags,
    time_of,
)
from rankscope.server.api.problems import Problem
from rankscope.server.api.verdict import summary
from rankscope.server.storage.access import audit
from rankscope.server.storage.database.engine import reading, writing
from rankscope.server.storage.ingest import agents, run_tags
from rankscope.server.storage.ingest.newest_attempts import STATUS, newest_attempts
from rankscope.server.storage.judgement import alerts, baselines
from rankscope.server.storage.judgement.alerts import Findings
from rankscope.server.storage.maintenance import pruning
from rankscope.server.storage.reading import runs, series

router = APIRouter(tags=["runs"])
_logger = logging.getLogger(__name__)

# A page ends with the place of its last run in the order that was asked for.
Paging = Annotated[Page, Depends(paging((float, int, str), int))]
_SORTS = tuple(f"{sign}{column}" for column in get_args(runs.RunColumn) for sign in ("", "-"))


@router.get("/runs")
def list_runs(
    engine: Database,
    page: Paging,
    project: str | None = None,
    state: RunState | None = None,
    baseline: Annotated[
        bool | None, Query(description="those that others of their project are compared with")
    ] = None,
    q: Annotated[str | None, Query(description="text that id or project contains")] = None,
    tag: Annotated[
        list[str] | None,
        Query(description="a tag that they have; of several, all", max_length=wire.tags.MOST),
    ] = None,
    order: Annotated[
        Literal["newest", "attention"],
        Query(description="`attention`: running ones first, then those that failed or were lost"),
    ] = "newest",
    sort: Annotated[
        str | None,
        Query(
            pattern=f"^({'|'.join(_SORTS)})$",
            description="a column instead of `order`, with `-` the largest first: "
            + ", ".join(f"`{column}`" for column in get_args(runs.RunColumn)),
        ),
    ] = None,
) -> Items[Run]:
    """Runs, newest first."""
    column = None if sort is None else cast(runs.RunColumn, sort.removeprefix("-"))
    text = column in runs.TEXT_COLUMNS
    if page.after is not None and isinstance(page.after[0], str) != text:
        raise Problem(422, "cursor: is of another order of this list")
    with reading(engine) as connection:
        rows, after = runs.list_runs(
            connection,
            limit=page.limit,
            after=page.after,
            project=project,
            state=state,
            baseline=baseline,
            search=q,
            tags=tag or (),
            attention=order == "attention",
            column=column,
            descending=sort is not None and sort.startswith("-"),
        )
        return Items(items=summaries(connection, rows), next_cursor=next_cursor(after))


@router.get("/projects")
def list_projects(engine: Database, page: Annotated[Page, Depends(paging(str))]) -> Items[Project]:
    """Projects that have runs, by name."""
    with reading(engine) as connection:
        found, after = runs.list_projects(connection, limit=page.limit, after=page.after)
    return Items(
        items=[Project(name=name, runs=count) for name, count in found],
        next_cursor=next_cursor(after),
    )


@router.get("/runs/{run}")
def get_run(engine: Database, run: RunId) -> RunDetail:
    """A run with its ranks and what their agents said."""
    with reading(engine) as connection:
        row = known_run(connection, run)
        about = summaries(connection, [row])[0]
        ranks = newest_attempts(connection, run=row.key, columns=STATUS)
        events = runs.list_events(connection, run=row.key)
        # All at once: of a thousand ranks each look takes a while.
        names = ("loss", "step_seconds", *agents.plan_series(connection, run=row.key))
        latest = series.latest_values(connection, run=row.key, metrics=names)
        plans = agents.plans_of(latest)
        faults = agents.faults(connection, run=row.key)
    # Lists as they are, and checked together: a model made for each of a thousand ranks takes long.
    return RunDetail.model_validate(
        {
            **about.model_dump(),
            "evaluated_step": row.evaluated_step,
            "rank_status": [_status(rank, latest) for rank in ranks],
            "events": [AgentEvent(**(e | {"at": time_of(e["at"])})) for e in events],
            "agent": Agent(
                sampling=[
                    Sampling(
                        rank=rank,
                        overhead=plan.overhead,
                        sampled=plan.sampled,
                        intervals=plan.intervals,
                    )
                    for rank, plan in plans.items()
                ],
                dense_until=row.dense_until,
                faults=[
                    AgentFault(text=f.text, ranks=f.ranks, step=f.step, at=time_of(f.at))
                    for f in faults
                ],
                dropped=agents.dropped(r.dropped for r in ranks),
                late=row.late,
                given_up=row.given_up,
            ),
        }
    )


def _status(row: Any, latest: Mapping[tuple[int, str], float]) -> dict[str, Any]:
    """Members of a `RankStatus`, of the row of a rank's newest attempt."""
    status = dict(row._mapping)
    status["first_seen_at"] = time_of(status.pop("first_seen"))
    status["last_seen_at"] = time_of(status.pop("last_seen"))
    status["loss"] = latest.get((row.rank, "loss"))
    status["step_seconds"] = latest.get((row.rank, "step_seconds"))
    return status


@router.delete("/runs/{run}", status_code=204)
def delete_run(engine: Database, run: RunId, by: By) -> None:
    """Deletes a run that has ended, with all that belongs to it; this cannot be undone.

    A run that is running is refused (409). It takes as long as the run is large; what was cut off
    goes on when it is asked for again.
    """
    with reading(engine) as connection:
        row = known_run(connection, run)
    if not pruning.delete_run(engine, row.key, by=by):
        raise Problem(
            409,
            f"run {run!r} is running: stop its job first; one of which nothing is heard any more "
            "counts as lost within minutes, and can be deleted then",
        )
    _logger.info(
        "run %r of project %r (key %d) is deleted, as was asked for", run, row.project, row.key
    )


@router.put("/runs/{run}/baseline", status_code=204)
def mark_baseline(engine: Database, run: RunId, by: By) -> None:
    """Makes a run one that others of its project are compared with, whatever its verdict."""
    _say_baseline(engine, run, by, "marked")


@router.delete("/runs/{run}/baseline", status_code=204)
def unmark_baseline(engine: Database, run: RunId, by: By) -> None:
    """Makes a run none of the baselines of its project, though it may have passed."""
    _say_baseline(engine, run, by, "unmarked")


def _say_baseline(engine: Engine, run: str, by: audit.Actor, said: Baseline) -> None:
    with writing(engine) as connection:
        row = known_run(connection, run)
        baselines.say(connection, run=row.key, baseline=said)
        details = {"project": row.project, "before": row.baseline}
        act: audit.Act = "baseline.mark" if said == "marked" else "baseline.unmark"
        audit.record(connection, by, act, run, details)


@router.patch("/runs/{run}/tags")
def change_tags(engine: Database, run: RunId, changes: TagChanges, by: By) -> Tags:
    """Gives a run tags, words by which it is found again, and takes others off it.

    The first ones are those that the job has named (option `tags` of the agent); a job that starts
    again does not undo what was changed here.
    """
    for tag in changes.add:
        if (problem := wire.tags.problem_of(tag)) is not None:
            raise Problem(422, f"add: the tag {tag!r} {problem}")
    if both := sorted({*changes.add} & {*changes.remove}):
        raise Problem(422, f"add, remove: {both[0]!r} is in both")
    try:
        with writing(engine) as connection:
            key = known_run(connection, run).key
            found = run_tags.change(connection, run=key, add=changes.add, remove=changes.remove)
            details = {"add": sorted(changes.add), "remove": sorted(changes.remove)}
            audit.record(connection, by, "run.tags", run, details)
    except run_tags.TooMany as error:
        raise Problem(422, f"add: {error}") from error
    return Tags(tags=found)


def summaries(connection: Connection, rows: Sequence[Any]) -> list[Run]:
    """Runs as lists show them, of their rows."""
    keys = {row.key: row.id for row in rows}
    ranks = runs.ranks_seen(connection, runs=list(keys))
    found = alerts.findings(connection, runs=keys, now=time.time())
    return [
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
            tags=run_tags.unpacked(row.tags),
            verdict=summary(row, found[row.key]),
            baseline=row.baseline,
            open_alerts=sum(a.state == "open" and a.parent is None for a in found[row.key].alerts),
            worst_alert=_worst(found[row.key], silenced=False),
            silenced_alert=_worst(found[row.key], silenced=True),
        )
        for row in rows
    ]


def _worst(found: Findings, *, silenced: bool) -> OpenAlert | None:
    """The gravest, of equally grave ones the first: what the page of the run speaks of."""
    reported = [
        a
        for a in found.alerts
        if a.state == "open" and a.parent is None and (a.kind in found.silenced) == silenced
    ]
    if not reported:
        return None
    # A root is as grave as the worst that follows from it.
    below = {a.id: a.severity for a in found.alerts if a.parent is not None}
    shown = {
        a.id: severest(a.severity, *(below[c] for c in a.consequences if c in below))
        for a in reported
    }
    worst = max(reported, key=lambda a: (wire.SEVERITIES.index(shown[a.id]), -a.first_step))
    return OpenAlert.model_validate(
        {"id": worst.id, "kind": worst.kind, "severity": shown[worst.id], "title": worst.title}
    )
