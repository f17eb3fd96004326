"""Which runs others of their project are compared with: its baselines.

The server takes the newest runs that passed; a person marks further ones, which stay, or takes some
away, which stay away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from sqlalchemy import Connection, case, select, update

from rankscope.server.storage import schema

Baseline = Literal["passed", "marked", "unmarked"]
# Those that are baselines.
TAKEN: tuple[Baseline, ...] = ("passed", "marked")
# Runs of a project that are kept as baselines because they passed. The gate compares with 20; a
# job of several models has a run for each of them.
MOST_PASSED = 100
# The project of runs that name none, where trainings of all sorts lie side by side.
_UNNAMED = "default"


def learn(connection: Connection, row: Any, *, verdict: str) -> bool:
    """Takes a run as a baseline where it has passed, or no longer where it has not.

    Args:
        row: of the run, as it is locked.

    Returns:
        Whether there may be more of the project than are kept: see `trim`.
    """
    has_passed = row.state == "finished" and verdict == "pass" and row.evaluated >= row.arrivals
    wanted = {(None, True): "passed", ("passed", False): None}.get((row.baseline, has_passed), "")
    if wanted == "":
        return False
    r = schema.run
    connection.execute(update(r).where(r.c.key == row.key).values(baseline=wanted))
    return wanted is not None


def trim(connection: Connection, *, project: str) -> None:
    """Lets go of those that passed beyond the newest `MOST_PASSED` of a project."""
    r = schema.run
    newest = (
        select(r.c.key)
        .where(r.c.project == project, r.c.baseline == "passed")
        .order_by(r.c.started_at.desc(), r.c.key.desc())
    )
    keys = list(connection.scalars(newest.offset(MOST_PASSED)))
    for key in sorted(keys):
        connection.execute(update(r).where(r.c.key == key).values(baseline=None))


def before(connection: Connection, *, run: int, project: str) -> Sequence[Any]:
    """Rows of the baselines that began before a run: those marked by hand, then the newest.

    Where no project was named, those marked by hand alone: what else has passed there is as often
    another experiment with the same model. What began later is none for it.
    """
    r = schema.run
    marked = case((r.c.baseline == "marked", 0), else_=1)
    taken: tuple[Baseline, ...] = ("marked",) if project == _UNNAMED else TAKEN
    query = (
        select(r.c.key, r.c.id, r.c.world_size, r.c.config, r.c.arrivals, r.c.last_step)
        .where(r.c.project == project, r.c.baseline.in_(taken))
        .where(r.c.key < run, r.c.state != "running")
        .order_by(marked, r.c.started_at.desc(), r.c.key.desc())
    )
    return connection.execute(query.limit(MOST_PASSED)).all()


def say(connection: Connection, *, run: int, baseline: Baseline) -> None:
    """Marks a run as a baseline of its project, or takes it away; the server leaves it so."""
    r = schema.run
    connection.execute(update(r).where(r.c.key == run).values(baseline=baseline))
