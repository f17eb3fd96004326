"""A batch into the database: all of it in the caller's transaction, and only once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from sqlalchemy import Connection, func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from rankscope.agent import wire
from rankscope.server.storage import schema
from rankscope.server.storage.packing import pack, pack_steps
from rankscope.server.storage.plain import plain

# How fast the estimate of the typical gap between posts follows: a stochastic approximation of the
# median moves by this share of itself towards each new gap.
_GAP_GAIN = 0.1


def insert_ignoring(connection: Connection, table: Any) -> Any:
    """An insert that leaves a row with the same key alone."""
    dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
    return dialect.insert(table).on_conflict_do_nothing()


def store_batch(connection: Connection, batch: wire.Batch, *, received_at: float) -> wire.Answer:
    """Stores a batch with everything in it.

    Args:
        received_at: the server's time, seconds since 1970.

    Returns:
        What was stored; a batch that is there already stores nothing and says so.
    """
    run, arrival, dense_until = _run(connection, batch, received_at)
    new = connection.execute(
        insert_ignoring(connection, schema.batch)
        .values(
            run=run,
            rank=batch.rank,
            session=batch.session,
            seq=batch.seq,
            arrival=arrival,
            received_at=received_at,
            points=batch.points,
        )
        # What was inserted, since not every driver counts the rows of a conflict.
        .returning(schema.batch.c.seq)
    ).first()
    if new is None:
        return wire.Answer(accepted=0, duplicate=True, dense_until=dense_until)
    attempt, hello_wanted = _attempt(connection, run, batch, received_at)
    _chunks(connection, run, arrival, attempt, batch)
    _prints(connection, run, arrival, attempt, batch)
    if batch.events:
        connection.execute(
            insert(schema.event),
            [
                {
                    "run": run,
                    "arrival": arrival,
                    "n": n,
                    "rank": batch.rank,
                    "step": e.step,
                    "at": received_at,
                    "kind": e.kind,
                    "text": e.text,
                    "data": plain(e.data),
                }
                for n, e in enumerate(batch.events)
            ],
        )
    _run_state(connection, run, batch)
    return wire.Answer(
        accepted=batch.points + len(batch.prints),
        dense_until=dense_until,
        hello_wanted=hello_wanted,
    )


def _run(
    connection: Connection, batch: wire.Batch, received_at: float
) -> tuple[int, int, int | None]:
    """Key, arrival number of this batch, and the wish for dense sampling."""
    t = schema.run
    raised = (
        update(t)
        .where(t.c.id == batch.run)
        .values(
            arrivals=t.c.arrivals + 1,
            last_seen_at=received_at,
            world_size=batch.world_size,
            last_step=func.max(t.c.last_step, _last_step(batch))
            if connection.dialect.name == "sqlite"
            else func.greatest(t.c.last_step, _last_step(batch)),
        )
        .returning(t.c.key, t.c.arrivals, t.c.dense_until)
    )
    row = connection.execute(raised).first()
    if row is None:
        connection.execute(
            insert_ignoring(connection, t).values(
                id=batch.run,
                project=batch.project,
                state="running",
                world_size=batch.world_size,
                started_at=received_at if batch.hello is None else batch.hello.started_at,
                last_seen_at=received_at,
                last_step=-1,
                config={},
            )
        )
        row = connection.execute(raised).one()
    dense_until = row.dense_until
    if dense_until is not None and dense_until <= batch.through_step:
        dense_until = None
    return row.key, row.arrivals, dense_until


def _last_step(batch: wire.Batch) -> int:
    last = [int(c.steps.max()) for c in batch.columns.values() if len(c.steps)]
    return max([batch.through_step, *last])


def _attempt(
    connection: Connection, run: int, batch: wire.Batch, received_at: float
) -> tuple[int, bool]:
    """Number of the attempt that the batch belongs to, and whether its hello is missing."""
    t = schema.attempt
    key = (t.c.run == run, t.c.rank == batch.rank)
    known = connection.execute(select(t).where(*key, t.c.session == batch.session)).first()
    hello = None if batch.hello is None else wire.to_json(batch)["hello"]
    now: dict[str, Any] = {
        "last_seen": received_at,
        "state": batch.state,
        "phase": batch.phase,
        "error": batch.error,
        "world_size": batch.world_size,
        "dropped": dict(batch.dropped),
    }
    if batch.hello is not None:
        now |= {
            "host": batch.hello.host,
            "pid": batch.hello.pid,
            "local_rank": batch.hello.local_rank,
            "launcher": batch.hello.launcher,
            "wrapper": batch.hello.wrapper,
            "heartbeat_seconds": batch.hello.heartbeat_seconds,
            "started_at": batch.hello.started_at,
            "hello": plain(hello),
        }
        config = plain(batch.hello.config)
        connection.execute(update(schema.run).where(schema.run.c.key == run).values(config=config))
    if known is None:
        newest = connection.scalar(select(func.max(t.c.attempt)).where(*key))
        number = max(-1 if newest is None else int(newest), (batch.attempt or 0) - 1) + 1
        connection.execute(
            insert(t).values(
                {
                    "run": run,
                    "rank": batch.rank,
                    "session": batch.session,
                    "attempt": number,
                    "started_at": received_at,
                    "first_seen": received_at,
                    "last_step": _last_step(batch),
                    "through_step": batch.through_step,
                }
                | now
            )
        )
        return number, batch.hello is None
    gap = max(received_at - known.last_seen, 0.0)
    typical = known.typical_gap or gap
    typical += _GAP_GAIN * typical * float(np.sign(gap - typical))
    connection.execute(
        update(t)
        .where(*key, t.c.session == batch.session)
        .values(
            {
                "longest_gap": max(known.longest_gap, gap),
                "typical_gap": typical,
                "last_step": max(known.last_step, _last_step(batch)),
                "through_step": max(known.through_step, batch.through_step),
            }
            | now
        )
    )
    return known.attempt, known.hello is None and batch.hello is None


def _chunks(
    connection: Connection, run: int, arrival: int, attempt: int, batch: wire.Batch
) -> None:
    rows = []
    for kind, columns in (("scalar", batch.columns), ("word", batch.words)):
        held = {name: c for name, c in columns.items() if len(c.steps)}
        ids = metric_ids(connection, run=run, kind=kind, names=held)
        for name, column in held.items():
            steps, values = column.steps, column.values
            if len(steps) > 1 and not bool((np.diff(steps) > 0).all()):
                order = np.argsort(steps, kind="stable")
                steps, values = steps[order], values[order]
                # Of two values at one step the later one in the batch stays.
                last = np.append(np.diff(steps) > 0, True)
                steps, values = steps[last], values[last]
            rows.append(
                {
                    "run": run,
                    "metric": ids[name],
                    "rank": batch.rank,
                    "first_step": int(steps[0]),
                    "arrival": arrival,
                    "last_step": int(steps[-1]),
                    "attempt": attempt,
                    "points": len(steps),
                    "steps": pack_steps(steps),
                    "values": pack(values),
                }
            )
    if rows:
        connection.execute(insert(schema.chunk), rows)


def metric_ids(
    connection: Connection, *, run: int, kind: str, names: Mapping[str, Any]
) -> dict[str, int]:
    """Number of each metric in the run's dictionary; new names are entered.

    The caller holds the run's row, so numbers are given by one transaction at a time.
    """
    t = schema.metric
    if not names:
        return {}
    known = {
        row.name: row.id
        for row in connection.execute(
            select(t.c.name, t.c.id).where(t.c.run == run, t.c.kind == kind)
        )
    }
    missing = [name for name in names if name not in known]
    if missing:
        first = connection.scalar(select(func.max(t.c.id)).where(t.c.run == run))
        first = 0 if first is None else int(first) + 1
        rows = [
            {"run": run, "id": first + n, "kind": kind, "name": name}
            for n, name in enumerate(missing)
        ]
        connection.execute(insert(t), rows)
        known |= {str(row["name"]): first + n for n, row in enumerate(rows)}
    return known


def _prints(
    connection: Connection, run: int, arrival: int, attempt: int, batch: wire.Batch
) -> None:
    if not batch.prints:
        return
    connection.execute(
        insert_ignoring(connection, schema.fingerprint),
        [
            {
                "run": run,
                "stage": p.stage,
                "step": p.step,
                "rank": batch.rank,
                "attempt": attempt,
                "arrival": arrival,
                "table": p.table,
                "digests": pack(p.digests),
                "sketches": None if p.sketches is None else pack(p.sketches),
                "buckets": 0 if p.sketches is None else p.sketches.shape[1],
            }
            for p in batch.prints
        ],
    )


def _run_state(connection: Connection, run: int, batch: wire.Batch) -> None:
    """Running while any rank runs; then failed if one failed, else finished once all are."""
    t = schema.attempt
    if batch.state == "running":
        state = "running"
    else:
        newest = (
            select(t.c.rank, func.max(t.c.attempt).label("attempt"))
            .where(t.c.run == run)
            .group_by(t.c.rank)
            .subquery()
        )
        states = [
            row.state
            for row in connection.execute(
                select(t.c.state)
                .join(newest, (t.c.rank == newest.c.rank) & (t.c.attempt == newest.c.attempt))
                .where(t.c.run == run)
            )
        ]
        if "running" in states or len(states) < batch.world_size:
            state = "running"
        else:
            state = "failed" if "failed" in states else "finished"
    connection.execute(
        update(schema.run)
        .where(schema.run.c.key == run, schema.run.c.state != state)
        .values(state=state)
    )
