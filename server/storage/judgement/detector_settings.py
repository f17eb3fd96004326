"""Settings of detectors: what was set for projects, and what each run is judged by."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, select

from rankscope.server.storage import schema
from rankscope.server.storage.database import dialect


def load_run(connection: Connection, *, run: int) -> dict[str, Any] | None:
    """What a run is judged by, in plain JSON; None before it was first evaluated."""
    t = schema.judged_by
    data = connection.scalar(select(t.c.settings).where(t.c.run == run))
    return None if data is None else dict(data)


def save_run(connection: Connection, *, run: int, settings: dict[str, Any]) -> None:
    """Keeps what a run is judged by; what is there already stays."""
    statement = dialect.insert(connection, schema.judged_by).on_conflict_do_nothing()
    connection.execute(statement.values(run=run, settings=settings))


def load_project(
    connection: Connection, *, project: str, to_change: bool = False
) -> dict[str, Any]:
    """What was set for a project, as `detectors.settings.read` takes it; empty for nothing.

    Args:
        to_change: others who want to change it wait for the end of the transaction.
    """
    t = schema.project_settings
    row = select(t.c.settings).where(t.c.project == project)
    return dict(connection.scalar(row.with_for_update() if to_change else row) or {})


def save_project(
    connection: Connection, *, project: str, settings: dict[str, Any], now: float
) -> None:
    """Puts settings in the place of those that were there.

    Args:
        now: seconds since 1970.
    """
    t = schema.project_settings
    values = {"settings": settings, "changed_at": now}
    statement = dialect.insert(connection, t).values(project=project, **values)
    connection.execute(statement.on_conflict_do_update(index_elements=[t.c.project], set_=values))
