"""What the worker reads and writes while it evaluates runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sqlalchemy import Connection, Row, delete, insert, select, text, union, update

from rankscope.agent import wire
from rankscope.server.storage import schema
from rankscope.server.storage.database import dialect
from rankscope.server.storage.ingest import starts
from rankscope.server.storage.ingest.fingerprints import bytes_of, fingerprint_of, load_contents
from rankscope.server.storage.ingest.tables import load_tables
from rankscope.server.storage.judgement.alerts import alert_from_row, alert_to_row
from rankscope.server.storage.judgement.liveness import LivenessReader
from rankscope.server.storage.reading.columns import load_columns
from rankscope.server.storage.reading.layers import load_new as load_new_layers
from rankscope.server.window import (
    Alert,
    Check,
    Columns,
    FingerprintPart,
    NewData,
    Occurrence,
)

# A run that says nothing for this long is evaluated no more, until a rank posts again.
_FORGET_SECONDS = 24 * 3600.0
# Events that detectors read.
_EVENTS = (
    "amp.skipping",
    "buffers.nonfinite",
    "checkpoint",
    "failed",
    "gradient.skipped",
    "layers.frozen",
    "layers.untrained",
    "mode.changed",
    "nonfinite",
    "optimizer.state",
    "optimizers.turns",
    "parameters.frozen",
    "parameters.moved",
    "parameters.written",
    "scheduler.wrapped",
    "stalled",
    "unstepped",
)
# Fingerprints of large models are large: a page has no more than this of them, and a batch.
_PAGE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run as the worker sees it."""

    key: int
    id: str
    state: str
    world_size: int
    arrivals: int
    evaluated: int
    last_seen_at: float
    config: Mapping[str, Any]
    project: str


def runs_to_evaluate(connection: Connection, *, now: float) -> list[RunRow]:
    """Runs with something new, and those that still run (they can fall silent)."""
    t = schema.run
    # Two questions, for each of which there is an index; together there is none.
    keys = union(
        select(t.c.key).where(t.c.arrivals > t.c.evaluated),
        select(t.c.key).where(
            t.c.state == text("'running'"), t.c.last_seen_at > now - _FORGET_SECONDS
        ),
    )
    found = connection.execute(select(t).where(t.c.key.in_(keys)).order_by(t.c.key))
    return [
        RunRow(
            key=row.key,
            id=row.id,
            state=row.state,
            world_size=row.world_size,
            arrivals=row.arrivals,
            evaluated=row.evaluated,
            last_seen_at=row.last_seen_at,
            config=row.config,
            project=row.project,
        )
        for row in found
    ]


def load_new(
    connection: Connection,
    *,
    run: int,
    after: int,
    limit: int = 2000,
    metrics: Collection[str] | None = None,
    stages: Collection[str] | None = None,
    known: LivenessReader | None = None,
    layers: Collection[str] = (),
    beyond: int = -1,
) -> NewData:
    """What arrived after `after`: at most `limit` batches of it, and no more than memory takes.

    It is of the job's last start alone: what its earlier processes left on disk may come later.

    Args:
        metrics: scalars that are wanted; None for all.
        stages: digests and fingerprints that are wanted; None for all.
        known: what the caller read of the ranks before, so that only changes cost something.
        layers: numbers of single tensors that are wanted.
        beyond: of these, batches that begin at this step or before are not examined.
    """
    head = connection.execute(
        select(
            *(schema.run.c.arrivals, schema.run.c.world_size, schema.run.c.config),
            schema.run.c.start,
        ).where(schema.run.c.key == run)
    ).one()
    # Of the first one that is all there is.
    own: Mapping[int, int] | None = None
    start = (head.start, 0)
    if head.start:
        own, began = starts.first_attempts(connection, run=run, start=head.start)
        start = (head.start, began)
    fingerprints, arrival = _fingerprints(
        connection, run, after, min(head.arrivals, after + limit), stages
    )
    numbers, arrival = load_new_layers(
        connection, run=run, after=after, until=arrival, metrics=layers, beyond=beyond
    )
    columns, digests, arrival = load_columns(
        connection,
        run=run,
        after=after,
        until=arrival,
        wanted={"scalar": metrics, "word": stages},
        enough=_PAGE_BYTES,
    )
    reader = LivenessReader() if known is None else known
    living = reader.read(connection, run=run, start=head.start)
    hellos = _hellos(connection, run, reader.described_since(after))
    return NewData(
        arrival=arrival,
        more=arrival < head.arrivals,
        columns=_columns_of(own, columns),
        digests=_columns_of(own, digests),
        fingerprints=tuple(
            part
            for came, part in fingerprints
            if came <= arrival and _is_of(own, part.rank, part.attempt)
        ),
        liveness=living,
        tables=_tables(connection, run, hellos),
        world_size=head.world_size,
        config=head.config,
        configs={row.rank: row.config for row in hellos},
        events=_events(connection, run, after, arrival, own),
        layers=tuple(
            part
            for came, part in numbers
            if came <= arrival and _is_of(own, part.rank, part.attempt)
        ),
        start=start,
    )


def _is_of(own: Mapping[int, int] | None, rank: int, attempt: int) -> bool:
    """Whether a process belongs to the start of the job that is evaluated.

    Args:
        own: number of each rank's first process in it; None where all processes do.
    """
    return own is None or (rank in own and attempt >= own[rank])


def _columns_of(own: Mapping[int, int] | None, columns: tuple[Columns, ...]) -> tuple[Columns, ...]:
    if own is None:
        return columns
    found = []
    for part in columns:
        rows = np.array([_is_of(own, rank, part.attempt) for rank in part.ranks.tolist()])
        if rows.all():
            found.append(part)
        elif rows.any():
            found.append(
                replace(
                    part,
                    ranks=part.ranks[rows],
                    arrivals=part.arrivals[rows],
                    values=part.values[rows],
                )
            )
    return tuple(found)


def _fingerprints(
    connection: Connection, run: int, after: int, until: int, stages: Collection[str] | None
) -> tuple[list[tuple[int, FingerprintPart]], int]:
    """Fingerprints that arrived up to `until`, or up to where there are enough of them."""
    f = schema.fingerprint
    query = select(f).where(f.c.run == run, f.c.arrival > after, f.c.arrival <= until)
    if stages is not None:
        query = query.where(f.c.stage.in_(stages))
    rows = connection.execute(query.order_by(f.c.arrival, f.c.step, f.c.stage)).all()
    size = 0
    seen: set[tuple[int, bytes]] = set()
    end = len(rows)
    for n, row in enumerate(rows):
        if size > _PAGE_BYTES and row.arrival > rows[n - 1].arrival:
            end, until = n, rows[n - 1].arrival
            break
        if (row.step, row.content) not in seen:
            seen.add((row.step, row.content))
            size += bytes_of(row)
    contents = load_contents(connection, run=run, rows=rows[:end])
    return [
        (row.arrival, FingerprintPart(row.rank, row.attempt, fingerprint_of(row, contents)))
        for row in rows[:end]
    ], until


def _hellos(
    connection: Connection, run: int, reported: Collection[tuple[int, int]]
) -> Sequence[Row[Any, Any, Any, Any]]:
    """Tables and configuration of some attempts (rank and number), by rank."""
    if not reported:
        return []
    a = schema.attempt.c
    rows = connection.execute(
        select(a.rank, a.attempt, a.tables, a.config)
        .where(a.run == run, a.rank.in_([rank for rank, _ in reported]))
        .order_by(a.rank)
    )
    wanted = {*reported}
    return [row for row in rows if (row.rank, row.attempt) in wanted]


def _tables(
    connection: Connection, run: int, newest: Sequence[Row[Any, Any, Any, Any]]
) -> dict[int, dict[str, wire.TensorTable]]:
    versions = {version for row in newest for version in row.tables.values()}
    # Ranks that hold the same share one object.
    tables = load_tables(connection, run=run, versions=versions)
    return {
        row.rank: {name: tables[version] for name, version in row.tables.items()} for row in newest
    }


def _events(
    connection: Connection, run: int, after: int, until: int, own: Mapping[int, int] | None
) -> tuple[Occurrence, ...]:
    e = schema.event
    rows = connection.execute(
        select(e)
        .where(e.c.run == run, e.c.arrival > after, e.c.arrival <= until, e.c.kind.in_(_EVENTS))
        .order_by(e.c.arrival, e.c.n)
    )
    return tuple(
        Occurrence(row.rank, row.step, row.kind, row.text, row.data, row.at)
        for row in rows
        if row.attempt is None or _is_of(own, row.rank, row.attempt)
    )


def load_alerts(connection: Connection, *, run: int) -> list[Alert]:
    """All alerts of a run, oldest first."""
    t = schema.alert
    names = run_id(connection, run=run)
    rows = connection.execute(
        select(t).where(t.c.run == run).order_by(t.c.opened_at, t.c.seen_step, t.c.id)
    )
    return [alert_from_row(row, names) for row in rows]


def run_id(connection: Connection, *, run: int) -> str:
    """The id that users know a run by."""
    return str(connection.execute(select(schema.run.c.id).where(schema.run.c.key == run)).scalar())


def save_alerts(
    connection: Connection,
    *,
    run: int,
    alerts: Sequence[Alert],
    transitions: Sequence[tuple[str, int, float, str, str]] = (),
    evaluated_before: int = -1,
) -> None:
    """Stores alerts as they are now, and what happened to them.

    On a replay the row that is there keeps `opened_at`, which is the past, and always what people
    said about it.

    Args:
        transitions: (alert id, step, time, what, reason) each.
        evaluated_before: last step that an earlier evaluation has reported: it had other blocks of
            steps, and so reported the same of other steps.
    """
    t = schema.alert
    for alert in alerts:
        row = alert_to_row(alert, run)
        kept = {"run", "id", "opened_at", "acknowledged"}
        statement = dialect.insert(connection, t).values(row)
        connection.execute(
            statement.on_conflict_do_update(
                index_elements=[t.c.run, t.c.id],
                set_={k: v for k, v in row.items() if k not in kept},
            )
        )
    e = schema.alert_event
    for alert_id, step, at, what, reason in transitions:
        known = connection.execute(
            select(e.c.n, e.c.step, e.c.what).where(e.c.run == run, e.c.alert == alert_id)
        ).all()
        if any(
            row.what == what and (row.step == step or step <= evaluated_before) for row in known
        ):
            continue  # a replay reports it again
        connection.execute(
            insert(e).values(
                run=run, alert=alert_id, n=len(known), step=step, at=at, what=what, reason=reason
            )
        )


def save_checks(connection: Connection, *, run: int, checks: Mapping[str, Check]) -> None:
    """Stores what each detector answers for the run now."""
    t = schema.check
    if not checks:
        return
    statement = dialect.insert(connection, t)
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=[t.c.run, t.c.kind],
            set_={"status": statement.excluded.status, "why": statement.excluded.why},
        ),
        [
            {"run": run, "kind": kind, "status": str(c.status), "why": c.why}
            for kind, c in checks.items()
        ],
    )


def forget(connection: Connection, *, run: int) -> None:
    """Takes back what an evaluation of an earlier start of the job said of it, but for alerts."""
    for t in (schema.check, schema.comparison):
        connection.execute(delete(t).where(t.c.run == run))


def current_start(connection: Connection, *, run: int) -> tuple[int, int]:
    """Number of the job's last start, and the arrival that it began with (0 for the first)."""
    number = connection.scalar(select(schema.run.c.start).where(schema.run.c.key == run)) or 0
    if not number:
        return 0, 0
    return number, starts.first_attempts(connection, run=run, start=number)[1]


def mark_evaluated(
    connection: Connection,
    *,
    run: int,
    arrival: int,
    last_step: int,
    late: int = 0,
    given_up: int = 0,
) -> None:
    """Everything up to `arrival` has been evaluated, up to `last_step`.

    Args:
        late: points and fingerprints that came after their step had been evaluated.
        given_up: fingerprints that there was no room for.
    """
    connection.execute(
        update(schema.run)
        .where(schema.run.c.key == run)
        .values(evaluated=arrival, evaluated_step=last_step, late=late, given_up=given_up)
    )


def ask_dense(connection: Connection, *, run: int, until_step: int) -> None:
    """Asks all ranks, with the answers to their next batches, for everything up to a step."""
    connection.execute(
        update(schema.run).where(schema.run.c.key == run).values(dense_until=until_step)
    )


def evaluated_step(connection: Connection, *, run: int) -> int:
    """Last step of a run that any evaluation has come to; -1 before the first."""
    r = schema.run
    return int(connection.execute(select(r.c.evaluated_step).where(r.c.key == run)).scalar_one())


def set_state(connection: Connection, *, run: int, state: str, arrival: int | None = None) -> None:
    """Sets the state of a run: `lost` when all of its ranks fell silent.

    Args:
        arrival: the newest one that was examined: where something has come since, its digest
            counts.
    """
    t = schema.run
    statement = update(t).where(t.c.key == run).values(state=state)
    if arrival is not None:
        statement = statement.where(t.c.arrivals == arrival)
    connection.execute(statement)
