"""The processes of a rank: numbered in the order in which they began, each with its signs of life.

A rank that restarts posts as another session and gets another attempt. What an earlier process left
on disk may arrive after what a later one posted; it still comes before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, insert, select, update

from rankscope.agent import wire
from rankscope.server.storage import schema
from rankscope.server.storage.plain import plain
from rankscope.server.storage.tables import store_tables

# How fast the estimate of the typical gap between posts follows: a stochastic approximation of the
# median moves by this share of itself towards each new gap.
_GAP_GAIN = 0.1

# What a process said of itself may be long.
_SHORT = [c for c in schema.attempt.c if c.name != "config"]


@dataclass(frozen=True, slots=True)
class Met:
    """What is known of the process that posted a batch.

    Attributes:
        latest: whether the batch is the last word of the newest process of its rank.
        hello_wanted: nothing is known of it but that it is there.
        tables: name of each of its tensor tables -> version, with those that the batch brought.
    """

    number: int
    latest: bool
    hello_wanted: bool
    tables: Mapping[str, str]


def meet(
    connection: Connection, *, run: int, batch: wire.Batch, arrival: int, received_at: float
) -> Met:
    """Notes a sign of life; the caller holds the run's row."""
    t = schema.attempt
    rows = connection.execute(
        select(*_SHORT).where(t.c.run == run, t.c.rank == batch.rank).order_by(t.c.attempt)
    ).all()
    known = next((row for row in rows if row.session == batch.session), None)
    tables: dict[str, str] = {} if known is None else dict(known.tables)
    if batch.hello is not None:
        tables |= store_tables(connection, run=run, tables=batch.hello.tables)
    if known is None:
        number = _number(connection, run, batch, rows)
        connection.execute(
            insert(t).values(
                {
                    "run": run,
                    "rank": batch.rank,
                    "session": batch.session,
                    "attempt": number,
                    "last_seq": place(batch.seq),
                    "started_at": received_at,
                    "first_seen": received_at,
                    "last_seen": received_at,
                    "sent_at": batch.sent_at,
                    "last_step": last_step(batch),
                    "through_step": batch.through_step,
                    "tables": tables,
                }
                | _said(batch)
                | _hello(batch, arrival, received_at)
            )
        )
    else:
        number = known.attempt
        # Batches may overtake each other: the last word is that of the last in order.
        news = _said(batch) if place(batch.seq) > known.last_seq else {}
        connection.execute(
            update(t)
            .where(t.c.run == run, t.c.rank == batch.rank, t.c.session == batch.session)
            .values(
                {
                    "last_seq": max(known.last_seq, place(batch.seq)),
                    "last_seen": max(known.last_seen, received_at),
                    "sent_at": max(known.sent_at, batch.sent_at),
                    "last_step": max(known.last_step, last_step(batch)),
                    "through_step": max(known.through_step, batch.through_step),
                }
                | ({} if tables == known.tables else {"tables": tables})
                | _gaps(known, batch, received_at)
                | news
                | _hello(batch, arrival, received_at)
            )
        )
    return Met(
        number=number,
        latest=all(row.attempt <= number for row in rows)
        and (known is None or place(batch.seq) > known.last_seq),
        hello_wanted=batch.hello is None and (known is None or known.hello_arrival is None),
        tables=tables,
    )


def place(seq: int) -> int:
    """Where a batch stands among those of its process.

    The pieces of one that had to be split have its number in the lower 32 bits and their own in the
    upper ones; they stand where it stood, and not behind all that came after it.
    """
    return min((seq & 0xFFFFFFFF) << 32 | seq >> 32, 2**63 - 1)


def last_step(batch: wire.Batch) -> int:
    """Last step that a batch says anything about; -1 for none."""
    last = [int(c.steps.max()) for c in batch.columns.values() if len(c.steps)]
    return max([batch.through_step, *last, *(made.step for made in batch.layers)])


def begun(hello: wire.Hello, received_at: float) -> float:
    """When a process began, by its own clock as far as that can be."""
    return min(max(hello.started_at, 0.0), received_at)


def newest_attempts(connection: Connection, *, run: int, below: int | None = None) -> Sequence[Any]:
    """The row of the newest attempt of each rank, by rank; without its `config`.

    Args:
        below: of ranks below this one only.
    """
    t = schema.attempt
    newest = select(t.c.rank, func.max(t.c.attempt).label("attempt")).where(t.c.run == run)
    if below is not None:
        newest = newest.where(t.c.rank < below)
    grouped = newest.group_by(t.c.rank).subquery()
    return connection.execute(
        select(*_SHORT)
        .join(grouped, (t.c.rank == grouped.c.rank) & (t.c.attempt == grouped.c.attempt))
        .where(t.c.run == run)
        .order_by(t.c.rank)
    ).all()


def _number(connection: Connection, run: int, batch: wire.Batch, rows: Sequence[Any]) -> int:
    """Number of a new attempt: after those that began before it, as far as the clocks can tell."""
    at_least = batch.attempt or 0
    later = None
    if (hello := batch.hello) is not None:
        # The clocks of two machines need not agree.
        on_this_host = [row for row in rows if row.host == hello.host]
        later = next((r.attempt for r in on_this_host if r.started_at > hello.started_at), None)
    if later is None:
        return max(at_least, rows[-1].attempt + 1 if rows else 0)
    before = max((row.attempt for row in rows if row.attempt < later), default=-1)
    number = min(max(before + 1, at_least), int(later) - 1)
    if number > before:
        return number
    _make_room(connection, run, batch.rank, int(later), {row.attempt for row in rows})
    return int(later)


def _make_room(connection: Connection, run: int, rank: int, number: int, taken: set[int]) -> None:
    end = number
    while end in taken:
        end += 1
    # From the last on, so that no two attempts have the same number in between.
    for one in range(end - 1, number - 1, -1):
        for t in (schema.attempt, schema.chunk, schema.layers, schema.fingerprint):
            connection.execute(
                update(t)
                .where(t.c.run == run, t.c.rank == rank, t.c.attempt == one)
                .values(attempt=one + 1)
            )


def _said(batch: wire.Batch) -> dict[str, Any]:
    return {
        "state": batch.state,
        "phase": batch.phase[:32],
        "error": batch.error,
        "world_size": batch.world_size,
        "dropped": dict(batch.dropped),
    }


def _hello(batch: wire.Batch, arrival: int, received_at: float) -> dict[str, Any]:
    hello = batch.hello
    if hello is None:
        return {}
    return {
        "host": hello.host,
        "pid": hello.pid,
        "local_rank": hello.local_rank,
        "launcher": hello.launcher,
        "wrapper": hello.wrapper,
        "heartbeat_seconds": hello.heartbeat_seconds,
        "started_at": begun(hello, received_at),
        # A hello that comes again for its tables need not repeat the rest.
        **({"config": plain(hello.config)} if hello.config else {}),
        "hello_arrival": arrival,
    }


def _gaps(known: Any, batch: wire.Batch, received_at: float) -> dict[str, float]:
    gap = max(received_at - known.last_seen, 0.0)
    if batch.sent_at > 0 and known.sent_at > 0:
        # While the server was away the rank was not silent: it could not be heard.
        gap = min(gap, max(batch.sent_at - known.sent_at, 0.0))
    typical = known.typical_gap or gap
    if gap != typical:
        typical *= 1 + (_GAP_GAIN if gap > typical else -_GAP_GAIN)
    return {"longest_gap": max(known.longest_gap, gap), "typical_gap": typical}
