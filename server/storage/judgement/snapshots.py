"""Where states of evaluations are kept; what they are is `server.evaluation.snapshot`'s."""

from __future__ import annotations

from sqlalchemy import Connection, select

from rankscope.server.storage import schema
from rankscope.server.storage.database import dialect


def load(connection: Connection, *, run: int, version: str) -> bytes | None:
    """The state of a run's evaluation as that version of the code left it."""
    t = schema.snapshot
    state: bytes | None = connection.scalar(
        select(t.c.state).where(t.c.run == run, t.c.version == version)
    )
    return state


def save(connection: Connection, *, run: int, version: str, arrival: int, state: bytes) -> None:
    """Keeps a state in the place of the one before.

    Args:
        arrival: newest arrival that it knows of.
    """
    t = schema.snapshot
    values = {"version": version, "arrival": arrival, "state": state}
    statement = dialect.insert(connection, t).values(run=run, **values)
    connection.execute(statement.on_conflict_do_update(index_elements=[t.c.run], set_=values))
