"""Verdict and loss as they are kept with a run, so that lists can be sorted by them."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, func, select, update

from rankscope.server.storage import schema
from rankscope.server.storage.reading.series import latest_values

# Of a run that goes on as before, seconds after which its loss is read again.
_AGAIN_S = 10.0


def due(connection: Connection, *, now: float, limit: int) -> list[int]:
    """Keys of runs that are to be judged again, those that wait longest first."""
    r = schema.run.c
    query = select(r.key).where(r.judge_at <= now).order_by(r.judge_at, r.key).limit(limit)
    return list(connection.scalars(query))


def locked(connection: Connection, *, run: int, now: float) -> Any | None:
    """The row of a run, which nobody changes before this transaction ends; None: not due now."""
    r = schema.run
    query = select(r).where(r.c.key == run, r.c.judge_at <= now).with_for_update()
    return connection.execute(query).first()


def ask(connection: Connection, *, run: int) -> None:
    """Something has changed: the run is judged again at once."""
    r = schema.run
    connection.execute(update(r).where(r.c.key == run).values(judge_at=0.0))


def ask_later(connection: Connection, *, run: int, now: float) -> None:
    """More of the same has come: the run is judged again in a while, unless it is already asked."""
    r = schema.run
    again = func.coalesce(r.c.judge_at, now + _AGAIN_S)
    connection.execute(update(r).where(r.c.key == run).values(judge_at=again))


def put_off(connection: Connection, *, run: int, until: float) -> None:
    """A run that cannot be judged is tried again then, and keeps nobody waiting."""
    connection.execute(update(schema.run).where(schema.run.c.key == run).values(judge_at=until))


def keep(connection: Connection, *, run: int, verdict: str, now: float) -> None:
    """Keeps a verdict, and the loss, until something changes or a silence ends."""
    s = schema.silence.c
    until = select(func.min(s.until)).where(s.run == run, s.until > now)
    losses = latest_values(connection, run=run, metrics=("loss",)).values()
    connection.execute(
        update(schema.run)
        .where(schema.run.c.key == run)
        .values(verdict=verdict, loss=_place(losses), judge_at=connection.scalar(until))
    )


def _place(losses: Collection[float]) -> float | None:
    """Where a run stands among others by its ranks' losses; None where there are none.

    What is no number is kept as the largest: SQLite has no NaN.
    """
    largest = sys.float_info.max
    known = [loss if math.isfinite(loss) else largest for loss in losses]
    # The lower one of the two in the middle: the mean of two large numbers is none.
    return statistics.median_low(known) if known else None
