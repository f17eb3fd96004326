"""What lists of runs are sorted by is judged again where something has changed."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine

from rankscope.server.alerts.verdict import Verdict, counted, judge
from rankscope.server.storage.database.engine import reading, writing
from rankscope.server.storage.judgement import standing
from rankscope.server.storage.judgement.alerts import Findings, findings

# Runs that are judged at a time: some 10 ms each on a slow disk, so that nobody waits for it long.
_AT_ONCE = 20


def verdict_of(state: str, row: Any, found: Findings, **options: Any) -> Verdict:
    """The verdict of a run, of its row and of what was found in it.

    Args:
        state: of the run, as it is or as if it were so.
        options: of `alerts.verdict.judge`.
    """
    return judge(
        state,
        row.world_size,
        counted(
            found.alerts,
            first=row.first_start,
            last=row.start,
            resumed_step=row.resumed_step,
        ),
        found.checks,
        silenced=found.silenced,
        **options,
    )


def keep_due(engine: Engine, now: float) -> bool:
    """Judges runs whose kept verdict or loss may not hold any more; whether there may be more."""
    with reading(engine) as connection:
        keys = standing.due(connection, now=now, limit=_AT_ONCE)
    for key in keys:
        with writing(engine) as connection:
            # Another server may have been here first.
            if (row := standing.locked(connection, run=key, now=now)) is not None:
                found = findings(connection, runs={key: row.id}, now=now)[key]
                verdict = verdict_of(row.state, row, found).verdict
                standing.keep(connection, run=key, verdict=verdict, now=now)
    return len(keys) == _AT_ONCE
