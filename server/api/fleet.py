"""`GET /fleet`: alerts of all runs by kind and by host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from rankscope.server.api.deps import Database
from rankscope.server.api.models import time_of
from rankscope.server.storage.database.engine import reading
from rankscope.server.storage.reading import fleet

router = APIRouter(tags=["alerts"])

_DAY = 86_400.0
# Runs that are named; their number is that of all.
_NAMED = 10


class Recurring(BaseModel):
    """Alerts of one kind, or that name ranks of one host."""

    name: str = Field(description="kind, or host")
    open: int = Field(description="alerts that are open")
    alerts: int = Field(description="alerts of the days asked for, and older open ones")
    runs: int = Field(description="runs that they are of")
    newest_runs: list[str] = Field(description="ids of up to 10 of them, newest alert first")
    others: list[str] = Field(description="hosts of a kind, kinds of a host")
    severity: str = Field(description="the gravest")
    newest_at: datetime = Field(description="when the newest opened")


class Fleet(BaseModel):
    """What is open, and what comes again and again."""

    days: float
    kinds: list[Recurring]
    hosts: list[Recurring]


@router.get("/fleet")
def get_fleet(
    engine: Database,
    project: str | None = None,
    days: Annotated[float, Query(gt=0, le=3650, description="how far back")] = 30.0,
) -> Fleet:
    """Alerts by kind and by host, those with most open ones first.

    Consequences of other alerts and mere information do not count. An alert that names more than
    half of a run's ranks, on several hosts, counts for no host.
    """
    with reading(engine) as connection:
        kinds, hosts = fleet.tallies(connection, since=time.time() - days * _DAY, project=project)
    return Fleet(days=days, kinds=_shown(kinds), hosts=_shown(hosts))


def _shown(tallies: Sequence[fleet.Tally]) -> list[Recurring]:
    return [
        Recurring(
            name=t.name,
            open=t.open,
            alerts=t.alerts,
            runs=len(t.runs),
            newest_runs=list(t.runs[:_NAMED]),
            others=list(t.others),
            severity=t.severity,
            newest_at=time_of(t.newest),
        )
        for t in tallies
    ]
