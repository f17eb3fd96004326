"""The newest processes of a run's ranks, as the evaluation sees them: read often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, func, select

from rankscope.server.storage import schema
from rankscope.server.window import LivenessPart, RankLiveness

_A = schema.attempt.c
# Not `tables`, `config` and `dropped`: to decode them costs more than all the rest.
_READ = (
    *(_A.rank, _A.attempt, _A.through_step, _A.started_at, _A.session, _A.first_seen, _A.last_seen),
    *(_A.last_step, _A.state, _A.phase, _A.error, _A.host, _A.heartbeat_seconds, _A.longest_gap),
    *(_A.typical_gap, _A.hello_arrival),
)
_NAMES = tuple(column.name for column in _READ)


class LivenessReader:
    """What was read of a run's ranks last: who has said nothing since is not made again.

    There is no column that says which rows have changed, so that all are read each time; but of
    a thousand ranks a few dozen have posted since the last check.
    """

    def __init__(self) -> None:
        self._rows: dict[int, tuple[Any, ...]] = {}
        self._newest: dict[int, LivenessPart] = {}

    def read(self, connection: Connection, *, run: int, start: int = 0) -> tuple[LivenessPart, ...]:
        """The newest attempt of each rank in a start of the job, by rank."""
        newest = (
            select(_A.rank, func.max(_A.attempt).label("attempt"))
            .where(_A.run == run, _A.start == start)
            .group_by(_A.rank)
            .subquery()
        )
        found = connection.execute(
            select(*_READ)
            .join(newest, (_A.rank == newest.c.rank) & (_A.attempt == newest.c.attempt))
            .where(_A.run == run)
            .order_by(_A.rank)
        )
        # Plain tuples: rows of SQLAlchemy compare themselves in Python.
        rows = [tuple(row) for row in found]
        for row in rows:
            rank = row[0]
            if self._rows.get(rank) != row:
                self._rows[rank] = row
                self._newest[rank] = _part(*row)
        return tuple([self._newest[row[0]] for row in rows])

    def described_since(self, after: int) -> Sequence[tuple[int, int]]:
        """Rank and attempt of those whose hello arrived after `after`, as of the last read."""
        return [
            (row[0], row[1])
            for row in self._rows.values()
            if (arrival := row[-1]) is not None and arrival > after
        ]


def _part(*values: Any) -> LivenessPart:
    row = dict(zip(_NAMES, values, strict=True))
    del row["hello_arrival"]
    through_step, started_at = row.pop("through_step"), row.pop("started_at")
    session = row.pop("session")
    return LivenessPart(RankLiveness(**row), row["attempt"], through_step, started_at, session)


def liveness_since(liveness: Sequence[LivenessPart], floor: float) -> tuple[LivenessPart, ...]:
    """Lives as if every rank that runs had been heard of at `floor`.

    While the server was away it could not hear anybody: silence is counted from its return. Of a
    rank that has ended the time stays: it says which one ended first.
    """
    return tuple(
        life
        if life.liveness.state != "running" or life.liveness.last_seen >= floor
        else replace(life, liveness=replace(life.liveness, last_seen=floor))
        for life in liveness
    )
