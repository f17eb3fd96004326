"""What each rank's newest attempt is: rows of attempts, as they stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Column, Connection, func, select

from rankscope.server.storage import schema

# What a process said of itself may be long.
_SHORT = [c for c in schema.attempt.c if c.name != "config"]
# How a rank is, as it was last heard of; of the names of tables, too, there is a list a rank.
STATUS = tuple(
    schema.attempt.c[name]
    for name in (
        *("rank", "attempt", "host", "pid", "local_rank", "launcher", "wrapper", "state", "phase"),
        *("error", "last_step", "first_seen", "last_seen", "heartbeat_seconds", "dropped"),
    )
)


def newest_attempts(
    connection: Connection,
    *,
    run: int,
    below: int | None = None,
    start: int | None = None,
    columns: Sequence[Column[Any]] = _SHORT,
) -> Sequence[Any]:
    """The row of the newest attempt of each rank, by rank.

    Args:
        columns: of `schema.attempt`; all but `config`, unless less will do.
        below: of ranks below this one only.
        start: of this start of the job only.
    """
    t = schema.attempt
    newest = select(t.c.rank, func.max(t.c.attempt).label("attempt")).where(t.c.run == run)
    if start is not None:
        newest = newest.where(t.c.start == start)
    if below is not None:
        newest = newest.where(t.c.rank < below)
    grouped = newest.group_by(t.c.rank).subquery()
    return connection.execute(
        select(*columns)
        .join(grouped, (t.c.rank == grouped.c.rank) & (t.c.attempt == grouped.c.attempt))
        .where(t.c.run == run)
        .order_by(t.c.rank)
    ).all()
