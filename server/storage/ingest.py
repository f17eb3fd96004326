"""A batch into the database: all of it in the caller's transaction, and only once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import Connection, case, func, insert, select, update

from rankscope.agent import wire
from rankscope.server.storage import dialect, schema
from rankscope.server.storage.attempts import Met, begun, last_step, meet, newest_attempts
from rankscope.server.storage.packing import pack, pack_steps
from rankscope.server.storage.plain import plain

_MAX_INTEGER = 2**31 - 1
# As long as their columns are.
_MAX_SESSION = _MAX_TABLE = _MAX_KIND = 64


def store_batch(connection: Connection, batch: wire.Batch, *, received_at: float) -> wire.Answer:
    """Stores a batch with everything in it.

    Args:
        received_at: the server's time, seconds since 1970.

    Returns:
        What was stored; a batch that is there already stores nothing and says so.

    Raises:
        wire.WireError: the database has no room for a number or a name in it.
    """
    for where, problem in _unstorable(batch):
        raise wire.WireError(where, problem)
    if (known := _run_with(connection, batch)) is not None:
        return wire.Answer(accepted=0, duplicate=True, dense_until=_wish(known, batch))
    run = _take_number(connection, batch, received_at)
    stored = connection.execute(
        dialect.insert(connection, schema.batch)
        .on_conflict_do_nothing()
        .values(
            run=run.key,
            rank=batch.rank,
            session=batch.session,
            seq=batch.seq,
            arrival=run.arrivals,
            received_at=received_at,
            points=batch.points,
        )
        # What was inserted, since not every driver counts the rows of a conflict.
        .returning(schema.batch.c.seq)
    ).first()
    if stored is None:  # it came twice at the same time
        return wire.Answer(accepted=0, duplicate=True, dense_until=_wish(run, batch))
    met = meet(connection, run=run.key, batch=batch, arrival=run.arrivals, received_at=received_at)
    _chunks(connection, run, met, batch)
    _layers(connection, run, met, batch)
    _prints(connection, run, met, batch)
    _events(connection, run, batch, received_at)
    if met.latest:
        _about_run(connection, run, batch)
    return wire.Answer(
        accepted=batch.points + len(batch.prints),
        dense_until=_wish(run, batch),
        hello_wanted=met.hello_wanted,
    )


def _unstorable(batch: wire.Batch) -> Iterator[tuple[str, str]]:
    """What an error of the database would refuse for ever, and each database differently."""
    if "/" in batch.run or "\\" in batch.run or batch.run in (".", ".."):
        yield "run", "stands in addresses, so it cannot have a slash; write '-' instead"
    numbers = {"rank": batch.rank, "world_size": batch.world_size, "attempt": batch.attempt or 0}
    if batch.hello is not None:
        numbers |= {"hello.pid": batch.hello.pid, "hello.local_rank": batch.hello.local_rank}
    for where, value in numbers.items():
        if value > _MAX_INTEGER:
            yield where, f"must be at most {_MAX_INTEGER}, not {value}"
    if len(batch.session) > _MAX_SESSION:
        yield "session", f"has at most {_MAX_SESSION} characters"
    for n, made in enumerate(batch.prints):
        if len(made.table) > _MAX_TABLE:
            yield f"prints[{n}].table", f"has at most {_MAX_TABLE} characters"
    for n, layers in enumerate(batch.layers):
        if len(layers.table) > _MAX_TABLE:
            yield f"layers[{n}].table", f"has at most {_MAX_TABLE} characters"


def _run_with(connection: Connection, batch: wire.Batch) -> Any | None:
    """The run's row, if the batch is there already."""
    r, b = schema.run, schema.batch
    return connection.execute(
        select(r.c.dense_until)
        .join(b, b.c.run == r.c.key)
        .where(
            r.c.id == batch.run,
            b.c.rank == batch.rank,
            b.c.session == batch.session,
            b.c.seq == batch.seq,
        )
    ).first()


def _take_number(connection: Connection, batch: wire.Batch, received_at: float) -> Any:
    """The run's row, held until the end of the transaction, with the number of this arrival."""
    t = schema.run
    step = last_step(batch)
    raised = (
        update(t)
        .where(t.c.id == batch.run)
        .values(
            arrivals=t.c.arrivals + 1,
            last_seen_at=case(
                (t.c.last_seen_at < received_at, received_at), else_=t.c.last_seen_at
            ),
            last_step=case((t.c.last_step < step, step), else_=t.c.last_step),
        )
        .returning(t.c.key, t.c.arrivals, t.c.dense_until, t.c.state, t.c.world_size)
    )
    row = connection.execute(raised).first()
    if row is not None:
        return row
    connection.execute(
        dialect.insert(connection, t)
        .on_conflict_do_nothing()
        .values(
            id=batch.run,
            project=batch.project,
            state="running",
            world_size=batch.world_size,
            started_at=received_at if batch.hello is None else begun(batch.hello, received_at),
            last_seen_at=received_at,
            last_step=-1,
            config={},
        )
    )
    return connection.execute(raised).one()


def _wish(run: Any, batch: wire.Batch) -> int | None:
    """Up to which step the rank is asked to sample everything."""
    wish: int | None = run.dense_until
    return None if wish is None or wish <= batch.through_step else wish


def _about_run(connection: Connection, run: Any, batch: wire.Batch) -> None:
    """What the last word of a rank says of the run as a whole."""
    t, a = schema.run, schema.attempt
    new: dict[str, Any] = {}
    if batch.world_size != run.world_size:
        new["world_size"] = batch.world_size
    if (state := _state(connection, run.key, batch)) != run.state:
        new["state"] = state
    if batch.hello is not None and batch.hello.config:
        # The lowest rank speaks for the run, whoever came first.
        lowest = connection.scalar(
            select(func.min(a.c.rank)).where(a.c.run == run.key, a.c.hello_arrival.is_not(None))
        )
        if batch.rank == lowest:
            new["config"] = plain(batch.hello.config)
    if new:
        connection.execute(update(t).where(t.c.key == run.key).values(new))


def _state(connection: Connection, run: int, batch: wire.Batch) -> str:
    """Running while any rank runs; then failed if one failed, else finished once all are."""
    if batch.state == "running":
        return "running"
    # A job that went on with fewer ranks does not wait for those that it left behind.
    ranks = newest_attempts(connection, run=run, below=batch.world_size)
    states = {row.state for row in ranks}
    if "running" in states or len(ranks) < batch.world_size:
        return "running"
    return "failed" if "failed" in states else "finished"


def _chunks(connection: Connection, run: Any, met: Met, batch: wire.Batch) -> None:
    rows = []
    columns = {
        _Series(kind, name): column
        for kind, of_kind in (("scalar", batch.columns), ("word", batch.words))
        for name, column in of_kind.items()
        if len(column.steps)
    }
    ids = _metric_ids(connection, run.key, columns)
    for series, column in columns.items():
        steps, values = _ascending(column)
        rows.append(
            {
                "run": run.key,
                "metric": ids[series],
                "rank": batch.rank,
                "first_step": int(steps[0]),
                "arrival": run.arrivals,
                "last_step": int(steps[-1]),
                "attempt": met.number,
                "points": len(steps),
                "steps": pack_steps(steps),
                "values": pack(values),
            }
        )
    if rows:
        connection.execute(insert(schema.chunk), rows)


def _ascending(column: wire.Column) -> tuple[wire.Int64, wire.Array]:
    """Steps in ascending order; of two values at one step the later one in the batch stays."""
    steps, values = column.steps, column.values
    if bool((steps[1:] > steps[:-1]).all()):
        return steps, values
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    last = np.append(steps[1:] > steps[:-1], True)
    return steps[last], values[last]


class _Series(NamedTuple):
    """What a run's dictionary has a number for."""

    kind: str
    name: str
    table: str = ""
    version: str = ""


def _metric_ids(
    connection: Connection, run: int, wanted: Collection[_Series]
) -> dict[_Series, int]:
    """Numbers of series in the run's dictionary.

    The run's row is held, so one transaction at a time gives numbers.
    """
    t = schema.metric
    if not wanted:
        return {}
    known = {
        _Series(row.kind, row.name, row.table, row.version): row.id
        for row in connection.execute(
            select(t).where(t.c.run == run, t.c.name.in_({series.name for series in wanted}))
        )
    }
    missing = [series for series in wanted if series not in known]
    if missing:
        newest = connection.scalar(select(func.max(t.c.id)).where(t.c.run == run))
        first = 0 if newest is None else int(newest) + 1
        known |= {series: first + n for n, series in enumerate(missing)}
        connection.execute(
            insert(t), [{"run": run, "id": known[s], **s._asdict()} for s in missing]
        )
    return known


def _layers(connection: Connection, run: Any, met: Met, batch: wire.Batch) -> None:
    parts: dict[tuple[_Series, int], dict[int, wire.Float64]] = defaultdict(dict)
    for made in batch.layers:
        if len(made.values):
            version = met.tables.get(made.table, "")
            series = _Series("layers", made.metric, made.table, version)
            parts[series, len(made.values)][made.step] = made.values
    ids = _metric_ids(connection, run.key, dict.fromkeys(series for series, _ in parts))
    rows = []
    for (series, tensors), by_step in parts.items():
        steps = np.array(sorted(by_step), dtype=np.int64)
        rows.append(
            {
                "run": run.key,
                "metric": ids[series],
                "rank": batch.rank,
                "first_step": int(steps[0]),
                "arrival": run.arrivals,
                "last_step": int(steps[-1]),
                "attempt": met.number,
                "points": len(steps),
                "tensors": tensors,
                "steps": pack_steps(steps),
                "values": pack(np.stack([by_step[int(step)] for step in steps], axis=1)),
            }
        )
    if rows:
        # Two lengths of one table at one step make no sense: the first stays.
        connection.execute(dialect.insert(connection, schema.layers).on_conflict_do_nothing(), rows)


def _prints(connection: Connection, run: Any, met: Met, batch: wire.Batch) -> None:
    if not batch.prints:
        return
    connection.execute(
        dialect.insert(connection, schema.fingerprint).on_conflict_do_nothing(),
        [
            {
                "run": run.key,
                "stage": p.stage,
                "step": p.step,
                "rank": batch.rank,
                "attempt": met.number,
                "arrival": run.arrivals,
                "table": p.table,
                "digests": pack(p.digests),
                "sketches": None if p.sketches is None else pack(p.sketches),
                "buckets": 0 if p.sketches is None else p.sketches.shape[1],
            }
            for p in batch.prints
        ],
    )


def _events(connection: Connection, run: Any, batch: wire.Batch, received_at: float) -> None:
    if not batch.events:
        return
    connection.execute(
        insert(schema.event),
        [
            {
                "run": run.key,
                "arrival": run.arrivals,
                "n": n,
                "rank": batch.rank,
                "step": e.step,
                "at": received_at,
                "kind": e.kind[:_MAX_KIND],
                "text": e.text,
                "data": plain(e.data),
            }
            for n, e in enumerate(batch.events)
        ],
    )
