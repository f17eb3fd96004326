"""Runs and ranks, as the routes read them."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, and_, case, false, func, not_, or_, select, tuple_

from rankscope.agent.wire import SEVERITIES
from rankscope.server.storage import schema
from rankscope.server.storage.access.visibility import of_visible, visible
from rankscope.server.storage.ingest import run_tags
from rankscope.server.storage.ingest.run_names import run_key
from rankscope.server.storage.judgement.baselines import TAKEN

# What runs can be sorted by.
RunColumn = Literal[
    "run",
    "project",
    "verdict",
    "state",
    "alerts",
    "ranks",
    "last_step",
    "heard",
    "started",
    "duration",
    "loss",
]
# Those of which the place of a run is a text.
TEXT_COLUMNS: frozenset[RunColumn] = frozenset(("run", "project", "state"))
Place = float | str


def list_runs(
    connection: Connection,
    *,
    limit: int,
    after: tuple[Place, int] | None = None,
    project: str | None = None,
    state: str | None = None,
    baseline: bool | None = None,
    search: str | None = None,
    tags: Sequence[str] = (),
    attention: bool = False,
    column: RunColumn | None = None,
    descending: bool = True,
) -> tuple[Sequence[Any], tuple[Place, int] | None]:
    """A page of run rows, newest start first, and where the next page begins.

    Args:
        after: what the page before ended with: (place, key).
        attention: running ones first, then those that failed or were lost, each newest first.
        baseline: those that are baselines of their projects alone, or those that are not.
        search: text that id or project contains.
        tags: those that have all of these.
        column: what they are sorted by instead; of `alerts`, those with the gravest open ones
            first, of equally grave ones those with most; of `verdict`, those that fail; of `loss`,
            those whose is not finite, and those without one always last.
        descending: the largest first; of `column` alone.
    """
    r = schema.run
    place: ColumnElement[Any] = r.c.started_at
    if column is not None:
        place = _place(column, descending)
    elif attention:
        place = r.c.started_at + _AHEAD * _urgency()
    falls = descending or column is None
    query = select(r, place.label("place")).where(of_visible(r.c.project))
    query = query.order_by(*((place.desc(), r.c.key.desc()) if falls else (place, r.c.key))).limit(
        limit + 1
    )
    if project is not None:
        query = query.where(r.c.project == project)
    if state is not None:
        query = query.where(r.c.state == state)
    if baseline is not None:
        taken = func.coalesce(r.c.baseline.in_(TAKEN), false())
        query = query.where(taken if baseline else not_(taken))
    if search:
        query = query.where(
            or_(
                r.c.id.icontains(search, autoescape=True),
                r.c.project.icontains(search, autoescape=True),
            )
        )
    query = query.where(*(run_tags.has(tag) for tag in tags))
    if after is not None:
        here = tuple_(place, r.c.key)
        query = query.where(here < after if falls else here > after)
    rows = connection.execute(query).all()
    more = len(rows) > limit
    rows = rows[:limit]
    return rows, (rows[-1].place, rows[-1].key) if more else None


# Seconds by which a more urgent state goes before a newer start: longer than any two starts differ,
# and short enough for a double to keep milliseconds.
_AHEAD = 1e12


# Newest runs that a mistyped id is compared with, some 10 ms of it, and ids that are suggested.
_REMEMBERED, _SIMILAR = 2_000, 3

# Events that are long, and shown where an alert is.
SURROUNDINGS = ("console", "git.diff")

# Newest runs of a project among which those with fewer ranks are looked for.
_SEARCHED = 200

# Beyond all losses: that of a run without any.
_NO_LOSS = sys.float_info.max

# Open alerts of one run that count in its place among equally grave ones: more than it can have.
_MORE_THAN_ALERTS = 1_000_000


def _place(column: RunColumn, descending: bool) -> ColumnElement[Any]:
    r, a = schema.run.c, schema.alert.c
    if column == "alerts":
        gravity = case({name: n for n, name in enumerate(reversed(SEVERITIES))}, value=a.severity)
        roots = func.sum(case((a.parent.is_(None), 1), else_=0))
        place = func.coalesce(func.max(gravity) * _MORE_THAN_ALERTS + roots, 0)
        of_run = select(place).where(a.run == r.key, a.state == "open")
        return of_run.scalar_subquery().correlate(schema.run)
    if column == "verdict":
        # One that passes says so when all that has come has been judged, as `api.verdict` has it.
        passes = and_(r.verdict == "pass", r.evaluated >= r.arrivals)
        return case((r.verdict == "fail", 2), (passes, 0), else_=1)
    if column == "loss":
        return func.coalesce(r.loss, -_NO_LOSS if descending else _NO_LOSS)
    if column == "duration":
        return r.last_seen_at - r.started_at
    names = {"run": "id", "ranks": "world_size", "heard": "last_seen_at", "started": "started_at"}
    return r[names.get(column, column)]


def _urgency() -> ColumnElement[int]:
    return case({"running": 2, "failed": 1, "lost": 1}, value=schema.run.c.state, else_=0)


def list_projects(
    connection: Connection, *, limit: int, after: tuple[str] | None = None
) -> tuple[list[tuple[str, int]], tuple[str] | None]:
    """A page of projects by name, with the number of their runs, and where the next page begins.

    Args:
        after: what the page before ended with.
    """
    r = schema.run
    query = (
        select(r.c.project, func.count())
        .where(of_visible(r.c.project))
        .group_by(r.c.project)
        .order_by(r.c.project)
        .limit(limit + 1)
    )
    if after is not None:
        query = query.where(r.c.project > after[0])
    found = [(project, count) for project, count in connection.execute(query)]
    more = len(found) > limit
    found = found[:limit]
    return found, (found[-1][0],) if more else None


def find_run(connection: Connection, run_id: str) -> Any | None:
    """The row of a run, by the id that users know; None where there is none to be seen."""
    key = run_key(connection, run_id)
    row = connection.execute(select(schema.run).where(schema.run.c.key == key)).first()
    return row if row is not None and visible(row.project) else None


def similar(connection: Connection, run_id: str) -> list[str]:
    """Ids of runs that somebody may have meant, the likeliest first: of the newest ones."""
    r = schema.run
    newest = select(r.c.id).where(of_visible(r.c.project)).order_by(r.c.started_at.desc())
    known = list(connection.scalars(newest.limit(_REMEMBERED)))
    begun = [one for one in known if run_id and one.startswith(run_id)]
    alike = difflib.get_close_matches(run_id, known, n=_SIMILAR)
    return list(dict.fromkeys(alike + begun))[:_SIMILAR]


def list_beside(connection: Connection, row: Any) -> list[Any]:
    """Rows of the runs of further models that a run's processes train, of the same start.

    They are called RUN.2, RUN.3 and so on, and say themselves whose they are: a user may call a run
    so, too. Those of other projects are not asked: whoever may write there alone has no say here.
    """
    found: list[Any] = []
    while (other := find_run(connection, f"{row.id}.{len(found) + 2}")) is not None:
        found.append(other)
    return [
        r
        for r in found
        if r.project == row.project and r.config.get("first_run") == row.id and r.start == row.start
    ]


def list_smaller(connection: Connection, row: Any) -> Sequence[Any]:
    """Newest rows of a run's project that have fewer ranks than it, newest first."""
    r = schema.run
    newest = (
        select(r.c.key, r.c.id, r.c.world_size, r.c.config, r.c.started_at)
        .where(r.c.project == row.project, of_visible(r.c.project))
        .order_by(r.c.started_at.desc(), r.c.key.desc())
        .limit(_SEARCHED)
        .subquery()
    )
    query = select(newest).where(newest.c.world_size < row.world_size)
    return connection.execute(query.order_by(newest.c.started_at.desc(), newest.c.key.desc())).all()


def ranks_seen(connection: Connection, *, runs: Sequence[int]) -> Mapping[int, Sequence[int]]:
    """Ranks that have posted, ascending, by run."""
    t = schema.attempt
    seen: dict[int, list[int]] = {}
    if runs:
        rows = connection.execute(
            select(t.c.run, t.c.rank)
            .where(t.c.run.in_(runs))
            .distinct()
            .order_by(t.c.run, t.c.rank)
        )
        for row in rows:
            seen.setdefault(row.run, []).append(row.rank)
    return seen


def consoles(connection: Connection, *, run: int, step: int) -> list[Any]:
    """Of each rank, the reports of its last printed lines before a step and from it on.

    Those nearest to it, at most two a rank, in the order of ranks and steps.
    """
    e = schema.event.c
    nearest: dict[tuple[int, bool], Any] = {}
    rows = connection.execute(
        select(e.rank, e.step, e.at, e.data)
        .where(e.run == run, e.kind == "console")
        .order_by(e.rank, func.abs(e.step - step), e.at.desc(), e.n.desc())
    )
    for row in rows:
        nearest.setdefault((row.rank, row.step >= step), row)
    return [row for _, row in sorted(nearest.items())]


def git_diff(connection: Connection, *, run: int) -> dict[str, Any] | None:
    """What the working tree had beyond its commit when the run last began; None: nobody said."""
    e = schema.event.c
    newest = select(e.data).where(e.run == run, e.kind == "git.diff").order_by(e.arrival.desc())
    found: dict[str, Any] | None = connection.scalar(newest.limit(1))
    return found


def list_events(connection: Connection, *, run: int, limit: int = 200) -> list[dict[str, Any]]:
    """The newest events of a run, newest first, without what stands beside alerts alone."""
    e = schema.event
    rows = connection.execute(
        select(e)
        .where(e.c.run == run, e.c.kind.not_in(SURROUNDINGS))
        .order_by(e.c.arrival.desc(), e.c.n.desc())
        .limit(limit)
    )
    return [
        {"rank": r.rank, "step": r.step, "at": r.at, "kind": r.kind, "text": r.text, "data": r.data}
        for r in rows
    ]
