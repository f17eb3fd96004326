"""What lists of runs are sorted by is judged again where something has changed."""

from __future__ import annotations

import logging
from typing import Any

from sqlalchemy import Engine

from rankscope.server.alerts.verdict import Verdict, counted, judge
from rankscope.server.storage.database.engine import reading, writing
from rankscope.server.storage.judgement import baselines, sort_keys
from rankscope.server.storage.judgement.alerts import Findings, findings

_logger = logging.getLogger(__name__)
# Seconds after which a run that could not be judged is tried again: its traceback is one in a
# minute then.
_AFTER_FAILURE_S = 60.0
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


def _keep(engine: Engine, key: int, now: float) -> None:
    project = ""
    with writing(engine) as connection:
        # Another server may have been here first.
        if (row := sort_keys.locked(connection, run=key, now=now)) is not None:
            found = findings(connection, runs={key: row.id}, now=now)[key]
            verdict = verdict_of(row.state, row, found).verdict
            sort_keys.keep(connection, run=key, verdict=verdict, now=now)
            if baselines.learn(connection, row, verdict=verdict):
                project = row.project
    if project:
        # Apart: no other run is changed while this one is locked.
        with writing(engine) as connection:
            baselines.trim(connection, project=project)


def keep_due(engine: Engine, now: float) -> bool:
    """Judges runs whose kept verdict or loss may not hold any more; whether there may be more."""
    with reading(engine) as connection:
        keys = sort_keys.due(connection, now=now, limit=_AT_ONCE)
    for key in keys:
        try:
            _keep(engine, key, now)
        except Exception:
            # One run that cannot be judged stops no other one.
            _logger.exception("the verdict of run %d could not be kept", key)
            with writing(engine) as connection:
                sort_keys.put_off(connection, run=key, until=now + _AFTER_FAILURE_S)
    return len(keys) == _AT_ONCE
