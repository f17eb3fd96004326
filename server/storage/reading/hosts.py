"""On which hosts the ranks of runs are."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from sqlalchemy import Connection, select, true

from rankscope.server.storage import schema

# Runs that one query names: databases take some thousand parameters.
_AT_ONCE = 500


def of_runs(
    connection: Connection, runs: Sequence[int], *, until: float = math.inf
) -> dict[int, dict[int, str]]:
    """Host of each rank that was heard of, by run; of one that moved, that of its newest attempt.

    Args:
        runs: their keys.
        until: Unix time; attempts that began later do not count.
    """
    t = schema.attempt.c
    found: dict[int, dict[int, str]] = defaultdict(dict)
    for start in range(0, len(runs), _AT_ONCE):
        rows = connection.execute(
            select(t.run, t.rank, t.host)
            .where(t.run.in_(runs[start : start + _AT_ONCE]))
            .where(t.started_at <= until if math.isfinite(until) else true())
            .order_by(t.attempt)
        )
        for row in rows:
            found[row.run][row.rank] = row.host
    return dict(found)
