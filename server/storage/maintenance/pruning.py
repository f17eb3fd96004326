"""Deletes runs that have ended, with all that belongs to them: one, or all that are old."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, Engine, Select, Table, delete, select, tuple_

from rankscope.server.storage import schema
from rankscope.server.storage.access import audit
from rankscope.server.storage.access.audit import SERVER, Actor
from rankscope.server.storage.database import dialect, partitions
from rankscope.server.storage.database.engine import reading, writing

# Rows of a transaction: batches that come meanwhile wait for it.
_ROWS = 2000


def belonging() -> list[Table]:
    """All tables whose rows belong to a run; their keys begin with it."""
    return [t for t in schema.metadata.sorted_tables if "run" in t.c]


@dataclass(frozen=True, slots=True)
class OldRun:
    """A run of which nothing was heard for long.

    Attributes:
        last_seen_at: seconds since 1970.
        running: no server has said that it ended: it stays.
    """

    key: int
    id: str
    project: str
    last_seen_at: float
    running: bool


def old_runs(engine: Engine, *, seconds: float, project: str | None = None) -> list[OldRun]:
    """Runs of which nothing was heard for so long, the oldest first.

    Args:
        project: of this one alone; None: of all.
    """
    with reading(engine) as connection:
        query = _old(connection, seconds)
        if project is not None:
            query = query.where(schema.run.c.project == project)
        return [
            OldRun(r.key, r.id, r.project, r.last_seen_at, r.state == "running")
            for r in connection.execute(query)
        ]


def prune(
    engine: Engine, *, seconds: float, project: str | None = None, by: Actor = SERVER
) -> Iterator[OldRun]:
    """Deletes the runs that have ended and of which nothing was heard for so long; yields each.

    In small transactions, so that servers go on meanwhile; what was cut off goes on when it is
    called again. A run that is heard of while it is deleted keeps what is left of it.

    Args:
        project: of this one alone; None: of all.
        by: who asks for it.
    """
    ended = [run for run in old_runs(engine, seconds=seconds, project=project) if not run.running]
    partitions.drop_whole(engine, {run.key for run in ended})
    for run in ended:
        if _delete(engine, run.key, seconds, by):
            yield run


def delete_run(
    engine: Engine,
    run: int,
    *,
    by: Actor = SERVER,
    seconds: float | None = None,
    rest: Callable[[float], None] = lambda seconds: None,
) -> bool:
    """Deletes one run that has ended; False where it is running, or was started again meanwhile.

    In small transactions, as `prune` does. Its name is free again afterwards.

    Args:
        by: who asks for it.
        seconds: nothing is to have been heard of it for so long, or it stays.
        rest: called with the seconds that each transaction took, before the next one.
    """
    return _delete(engine, run, seconds, by, rest)


def _delete(
    engine: Engine,
    run: int,
    seconds: float | None,
    by: Actor,
    rest: Callable[[float], None] = lambda seconds: None,
) -> bool:
    """Deletes one run that nothing was heard of for so long; False where it is no longer so."""
    r, n = schema.run, schema.run_name
    # Last of all the run itself: else what was cut off could not be found again.
    for table in [*belonging(), None]:
        more = True
        while more:
            with writing(engine) as connection:
                began = time.monotonic()
                ended = (r.c.key == run) & (r.c.state != "running")
                held = select(r.c.id, r.c.project).where(ended).with_for_update()
                if seconds is not None:
                    held = held.where(_unheard_of(connection, seconds))
                row = connection.execute(held).first()
                if row is None:
                    return False
                if table is not None:
                    more = _delete_some(connection, table, run)
                else:
                    connection.execute(delete(r).where(r.c.key == run))
                    connection.execute(delete(n).where(n.c.key == run))
                    audit.record(connection, by, "run.delete", row.id, {"project": row.project})
                    more = False
            rest(time.monotonic() - began)
    return True


def _delete_some(connection: Connection, table: Table, run: int) -> bool:
    """Deletes a part of what a table has of a run; whether there may be more."""
    keys = list(table.primary_key)
    part = select(*keys).where(table.c.run == run).order_by(*keys).limit(_ROWS)
    done = connection.execute(delete(table).where(table.c.run == run, tuple_(*keys).in_(part)))
    return done.rowcount == _ROWS


def _old(connection: Connection, seconds: float) -> Select[tuple[int, str, str, float, str]]:
    r = schema.run
    return (
        select(r.c.key, r.c.id, r.c.project, r.c.last_seen_at, r.c.state)
        .where(_unheard_of(connection, seconds), _unmarked())
        .order_by(r.c.last_seen_at)
    )


def _unmarked() -> ColumnElement[bool]:
    """Somebody has marked the others as baselines: these are deleted by hand alone."""
    kept: ColumnElement[bool] = schema.run.c.baseline.is_distinct_from("marked")
    return kept


def _unheard_of(connection: Connection, seconds: float) -> ColumnElement[bool]:
    old: ColumnElement[bool] = schema.run.c.last_seen_at < dialect.clock(connection) - seconds
    return old
