"""Keys of runs: one for each name, ascending in the order in which runs were first heard of."""

from __future__ import annotations

from sqlalchemy import Connection, select

from rankscope.server.storage import schema
from rankscope.server.storage.database import dialect


def run_key(connection: Connection, run_id: str) -> int | None:
    """The key of a run, by the id that users know; None where there is none."""
    t = schema.run_name
    key: int | None = connection.scalar(select(t.c.key).where(t.c.id == run_id))
    return key


def give_key(connection: Connection, run_id: str) -> int:
    """The key of a run, a new one where it has none; waits for another server that gives it one."""
    t = schema.run_name
    connection.execute(
        dialect.insert(connection, t).on_conflict_do_nothing(index_elements=[t.c.id]),
        {"id": run_id},
    )
    # Committed by another server or just made here: in either case it is there now.
    key: int = connection.execute(select(t.c.key).where(t.c.id == run_id)).scalar_one()
    return key
