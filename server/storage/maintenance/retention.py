"""Which runs are no longer to be kept: by their age, and by the size of what a project has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlalchemy import Connection, Engine, func, select

from rankscope.server.storage import schema
from rankscope.server.storage.database.engine import reading
from rankscope.server.storage.maintenance.pruning import old_runs

# Bytes of a row beside its values: keys, numbers, its places in indexes. As measured on SQLite.
_OF_ROW = 100


@dataclass(frozen=True, slots=True)
class Retention:
    """What is kept of each project; what has no rule is kept for ever.

    Attributes:
        seconds: since anything was heard of a run; by project, None for all that have no rule of
            their own.
        bytes: of the runs of a project together, the latest first; likewise.
    """

    seconds: Mapping[str | None, float] = field(default_factory=dict)
    bytes: Mapping[str | None, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.seconds or self.bytes)


@dataclass(frozen=True, slots=True)
class Surplus:
    """A run that is no longer to be kept.

    Attributes:
        seconds: nothing is to have been heard of it for so long; None: it is too much for the size
            of its project, whatever its age.
    """

    key: int
    id: str
    project: str
    seconds: float | None


class Sizes:
    """Bytes of runs, about; those that have not changed are not counted again."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int]] = {}

    def of(self, connection: Connection, run: int, arrivals: int) -> int:
        """Bytes of what is stored of a run, after so many batches."""
        known = self._known.get(run)
        if known is None or known[0] != arrivals:
            known = self._known[run] = arrivals, _size(connection, run)
        return known[1]


def surplus(engine: Engine, retention: Retention, sizes: Sizes) -> list[Surplus]:
    """Runs that have ended and that no rule keeps, the oldest first."""
    with reading(engine) as connection:
        projects = [*connection.scalars(select(schema.run.c.project).distinct())]
    found = []
    for project in sorted(projects):
        seconds = retention.seconds.get(project, retention.seconds.get(None))
        old = [] if seconds is None else old_runs(engine, seconds=seconds, project=project)
        aged = [Surplus(run.key, run.id, project, seconds) for run in old if not run.running]
        found += aged
        most = retention.bytes.get(project, retention.bytes.get(None))
        if most is not None:
            gone = {run.key for run in aged}
            found += [run for run in _beyond(engine, project, most, sizes) if run.key not in gone]
    return found


def _beyond(engine: Engine, project: str, most: int, sizes: Sizes) -> list[Surplus]:
    """Runs of a project for which there is no room, the oldest first."""
    r = schema.run.c
    held = 0
    found = []
    with reading(engine) as connection:
        rows = connection.execute(
            select(r.key, r.id, r.arrivals, r.state, r.baseline)
            .where(r.project == project)
            .order_by(r.last_seen_at.desc(), r.key.desc())
        ).all()
        for row in rows:
            held += sizes.of(connection, row.key, row.arrivals)
            if held > most and row.state != "running" and row.baseline != "marked":
                found.append(Surplus(row.key, row.id, project, None))
    return found[::-1]


def _size(connection: Connection, run: int) -> int:
    size = 0
    for table in (schema.chunk, schema.layers, schema.fingerprint, schema.event):
        rows = connection.scalar(select(func.count()).where(table.c.run == run))
        size += int(rows or 0) * _OF_ROW
    contents = schema.print_content.c
    columns = schema.chunk.c["values"], schema.layers.c["values"]
    for values in (*columns, contents.digests, contents.sketches):
        # The length of a column is known without reading it.
        held = select(func.sum(func.length(values))).where(values.table.c.run == run)
        size += int(connection.scalar(held) or 0)
    return size
