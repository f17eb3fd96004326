"""Batches into the database: all of them in the caller's transaction, each only once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from sqlalchemy import Connection, Table, func, insert, select, update

from rankscope.agent import wire
from rankscope.server.storage import schema
from rankscope.server.storage.database import dialect
from rankscope.server.storage.database.bulk import Row, add_missing_rows, add_rows
from rankscope.server.storage.database.packing import pack, pack_steps
from rankscope.server.storage.database.plain import plain
from rankscope.server.storage.ingest import run_tags, starts
from rankscope.server.storage.ingest.attempts import (
    Attempts,
    Process,
    begun,
)
from rankscope.server.storage.ingest.chunks import Block, blocks
from rankscope.server.storage.ingest.dictionary import Dictionaries, RunDictionary, Series
from rankscope.server.storage.ingest.fingerprints import Content, content_of
from rankscope.server.storage.ingest.newest_attempts import newest_attempts
from rankscope.server.storage.ingest.run_names import give_key, run_key

# What an agent says of a value far outside its own recent past (agent/tripwires.py).
_TRIPWIRE = "tripwire"
# How much further than the ranks are by then everything is asked for, and how much further at most
# that is than what a rank has reported, as after an alert.
_TRIP_STEPS, _MAX_AHEAD = 20, 5000
# Ranks sample some 128 steps for one such request: not more often than this, which makes it 3 % of
# the steps at most. A request that an alert makes is not held back.
_BETWEEN_TRIPS = 4096
# As long as its column is.
_MAX_KIND = 64


def store_batch(connection: Connection, batch: wire.Batch, *, received_at: float) -> wire.Answer:
    """Stores one batch; see `store_batches`.

    Raises:
        wire.WireError: the database has no room for a number or a name in it.
    """
    check(batch)
    (answer,) = store_batches(connection, [(batch, received_at)], Dictionaries())
    return answer


def store_batches(
    connection: Connection, received: Sequence[tuple[wire.Batch, float]], known: Dictionaries
) -> list[wire.Answer]:
    """Stores batches with everything in them.

    Args:
        received: batches that `check` has passed, in the order in which they came, each with the
            server's time, seconds since 1970.
        known: what this process knows of the dictionaries of runs; the caller makes it forget if
            the transaction fails.

    Returns:
        What was stored, one for each; a batch that is there already stores nothing and says so.
    """
    answers: dict[int, wire.Answer] = {}
    by_run: dict[str, list[int]] = defaultdict(list)
    for n, (batch, _) in enumerate(received):
        by_run[batch.run].append(n)
    # In one order everywhere: two servers hold rows of several runs and must not wait in a circle.
    for name in sorted(by_run):
        places = by_run[name]
        of_run = _store_run(connection, [received[n] for n in places], known)
        answers.update(zip(places, of_run, strict=True))
    return [answers[n] for n in range(len(received))]


def check(batch: wire.Batch) -> None:
    """Looks for what an error of the database would refuse for ever, and each one differently.

    Raises:
        wire.WireError: it has no room for a number or a name in the batch.
    """
    for where, problem in _unstorable(batch):
        raise wire.WireError(where, problem)


def _store_run(
    connection: Connection, received: Sequence[tuple[wire.Batch, float]], known: Dictionaries
) -> list[wire.Answer]:
    """Stores batches of one run."""
    run = _hold(connection, *received[0])
    ranks = {batch.rank for batch, _ in received}
    attempts = Attempts(connection, run=run.key, ranks=ranks, start=run.start)
    rows = _Rows(connection, run.key, known.of(run.key, run.id, run.started_at))
    arrivals = run.arrivals
    tripped = [until for batch, _ in received if (until := _tripped(batch)) is not None]
    dense_until = run.dense_until
    if tripped and (dense_until is None or max(tripped) > dense_until + _BETWEEN_TRIPS):
        dense_until = max(tripped)
    answers = []
    stored: list[tuple[wire.Batch, float]] = []
    reporting: list[wire.Batch] = []
    last_step = run.last_step
    for batch, received_at in received:
        if attempts.has(batch):
            answer = wire.Answer(
                accepted=0, duplicate=True, dense_until=_dense_until(dense_until, batch)
            )
            answers.append(answer)
            continue
        arrivals += 1
        met = attempts.meet(batch, arrival=arrivals, received_at=received_at)
        rows.add(batch, met.process, arrival=arrivals, received_at=received_at)
        stored.append((batch, received_at))
        if met.process.row["start"] == run.start:
            last_step = max(last_step, met.last_step)
        if met.latest:
            reporting.append(batch)
        answers.append(
            wire.Answer(
                accepted=batch.points + len(batch.prints),
                dense_until=_dense_until(dense_until, batch),
                hello_wanted=met.hello_wanted,
            )
        )
    if stored:
        attempts.write()
        rows.write()
        begun_anew = _begun_anew(connection, run, reporting) if attempts.moved else {}
        new = {
            "arrivals": arrivals,
            # An evaluation may request dense sampling, too.
            **({} if dense_until == run.dense_until else {"dense_until": dense_until}),
            "last_seen_at": max(run.last_seen_at, *(at for _, at in stored)),
            "last_step": last_step,
            **begun_anew,
            **_about_run(connection, run, reporting, start=begun_anew.get("start", run.start)),
        }
        t = schema.run
        connection.execute(update(t).where(t.c.key == run.key).values(new))
    return answers


def _unstorable(batch: wire.Batch) -> Iterator[tuple[str, str]]:
    if "/" in batch.run or "\\" in batch.run:
        yield "run", "stands in addresses, so it cannot have a slash; write '-' instead"
    if batch.run in (".", ".."):
        yield "run", "stands in addresses, where dots alone mean something else"
    for where, name in (("run", batch.run), ("project", batch.project)):
        if name != name.strip():
            yield where, "has spaces at its begin or end, which nobody would see"
    # Whoever makes a batch in this process has not come by the wire, which looks at all of them.
    numbers = {
        "rank": (batch.rank, wire.limits.RANK),
        "world_size": (batch.world_size, wire.limits.RANKS),
        "attempt": (batch.attempt or 0, wire.limits.ATTEMPT),
        "seq": (batch.seq, wire.limits.SEQ),
        "through_step": (batch.through_step, wire.limits.STEP),
    }
    if batch.hello is not None:
        numbers["hello.pid"] = (batch.hello.pid, wire.limits.PID)
        numbers["hello.local_rank"] = (batch.hello.local_rank, wire.limits.RANK)
    for where, (value, limit) in numbers.items():
        if value > limit.most:
            yield where, f"must be at most {limit.most}, not {value}"
    labels = {"session": batch.session}
    labels |= {f"prints[{n}].table": made.table for n, made in enumerate(batch.prints)}
    labels |= {f"layers[{n}].table": made.table for n, made in enumerate(batch.layers)}
    for where, label in labels.items():
        if len(label) > wire.limits.LABEL.most:
            yield where, f"has at most {wire.limits.LABEL.most} characters"


def _hold(connection: Connection, batch: wire.Batch, received_at: float) -> Any:
    """The run's row, held until the end of the transaction."""
    t = schema.run
    held = select(
        *(t.c.key, t.c.id, t.c.started_at, t.c.arrivals, t.c.dense_until),
        *(t.c.last_seen_at, t.c.last_step, t.c.world_size, t.c.start),
    ).with_for_update()
    key = run_key(connection, batch.run)
    if key is not None and (row := connection.execute(held.where(t.c.key == key)).first()):
        return row
    key = give_key(connection, batch.run)
    connection.execute(
        dialect.insert(connection, t)
        .on_conflict_do_nothing()
        .values(
            key=key,
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
    return connection.execute(held.where(t.c.key == key)).one()


def _tripped(batch: wire.Batch) -> int | None:
    """Up to which step all ranks are to sample everything, where this one's tripwire tripped.

    They hear of it with the answers to their next batches: by then a job is as many steps further
    as lie in a batch, once for this one and once for theirs.
    """
    if not any(event.kind == _TRIPWIRE for event in batch.events):
        return None
    steps = [column.steps for column in batch.columns.values() if len(column.steps)]
    further = max((int(s.max()) for s in steps), default=0)
    further -= min((int(s.min()) for s in steps), default=0)
    return batch.through_step + _TRIP_STEPS + min(2 * further, _MAX_AHEAD)


def _dense_until(requested: int | None, batch: wire.Batch) -> int | None:
    """Up to which step the rank is asked to sample everything."""
    return None if requested is None or requested <= batch.through_step else requested


def _begun_anew(
    connection: Connection, run: Any, reporting: Sequence[wire.Batch]
) -> dict[str, Any]:
    """What changes of a run where its processes belong to other starts of the job than before."""
    if not starts.may_have_several(connection, run=run.key):
        return {}
    world_size = _world_size(connection, run, reporting) if reporting else run.world_size
    found = starts.refresh(connection, run=run.key, world_size=world_size)
    new: dict[str, Any] = {
        "start": found.last,
        "first_start": found.first,
        "resumed_step": found.resumed_step,
    }
    if found.last != run.start:
        last_step = starts.last_step(connection, run=run.key, start=found.last)
        # What was evaluated, and is to be sampled densely, was of the start before.
        new |= {"last_step": last_step, "evaluated_step": -1, "dense_until": None}
    return new


def _about_run(
    connection: Connection, run: Any, reporting: Sequence[wire.Batch], *, start: int
) -> dict[str, Any]:
    """What the ranks' last messages, in the order of arrival, say of the run as a whole."""
    if not reporting:
        return {}
    world_size = _world_size(connection, run, reporting)
    new: dict[str, Any] = {
        "world_size": world_size,
        "state": _state(connection, run.key, reporting[-1], world_size, start),
    }
    configs = {b.rank: b.hello.config for b in reporting if b.hello is not None and b.hello.config}
    if configs:
        a = schema.attempt
        # The lowest rank speaks for the run, whoever came first.
        lowest = connection.scalar(
            select(func.min(a.c.rank)).where(a.c.run == run.key, a.c.hello_arrival.is_not(None))
        )
        if lowest in configs:
            new["config"] = plain(configs[lowest])
            if named := wire.tags.of_config(new["config"]):
                # Once: what people have said of the run since holds for a job that comes back.
                new["tags"] = func.coalesce(schema.run.c.tags, run_tags.packed(named))
    return new


def _world_size(connection: Connection, run: Any, reporting: Sequence[wire.Batch]) -> int:
    """Number of ranks: what was said last; where ranks say too few for their own number, no fewer.

    A client that does not know it says 1. Taken literally, its ranks would be judged as jobs of
    one rank: nobody would compare them, and the run would pass.
    """
    said = reporting[-1].world_size
    if said >= run.world_size and all(batch.rank < batch.world_size for batch in reporting):
        return said
    a = schema.attempt.c
    highest = connection.scalar(
        select(func.max(a.rank)).where(a.run == run.key, a.rank >= a.world_size)
    )
    return said if highest is None else max(said, highest + 1)


def _state(connection: Connection, run: int, batch: wire.Batch, world_size: int, start: int) -> str:
    """Running while any rank runs; then failed if one failed, else finished once all are."""
    if batch.state == "running":
        return "running"
    # A job that went on with fewer ranks does not wait for those that it left behind.
    ranks = newest_attempts(connection, run=run, below=world_size, start=start)
    states = {row.state for row in ranks}
    if "running" in states or len(ranks) < world_size:
        return "running"
    return "failed" if "failed" in states else "finished"


class _Rows:
    """What batches of a run bring, table by table, to be written at once."""

    def __init__(self, connection: Connection, run: int, dictionary: RunDictionary) -> None:
        self._connection = connection
        self._run = run
        self._dictionary = dictionary
        # Each with its process, as that one's number may still rise.
        self._chunks: list[tuple[Process, int, int, Block]] = []
        self._layers: list[tuple[Process, dict[str, Any]]] = []
        self._fingerprints: list[tuple[Process, dict[str, Any]]] = []
        self._contents: dict[tuple[int, bytes], Content] = {}
        self._events: list[tuple[Process, dict[str, Any]]] = []

    def add(self, batch: wire.Batch, process: Process, *, arrival: int, received_at: float) -> None:
        """Takes a batch."""
        for block in blocks(self._connection, self._dictionary, batch):
            self._chunks.append((process, batch.rank, arrival, block))
        if batch.layers:
            self._add_layers(batch, process, arrival)
        for made in batch.prints:
            content = content_of(made)
            self._contents[made.step, content.key] = content
            row = {
                "run": self._run,
                "stage": made.stage,
                "step": made.step,
                "rank": batch.rank,
                "table": made.table,
                "arrival": arrival,
                "tensors": len(made.digests),
                "buckets": 0 if made.sketches is None else made.sketches.shape[1],
                "content": content.key,
            }
            self._fingerprints.append((process, row))
        for n, event in enumerate(batch.events):
            row = {
                "run": self._run,
                "arrival": arrival,
                "n": n,
                "rank": batch.rank,
                "step": event.step,
                "at": received_at,
                "kind": event.kind[:_MAX_KIND],
                "text": event.text,
                "data": plain(event.data),
            }
            self._events.append((process, row))

    def write(self) -> None:
        """Writes everything."""
        add_rows(self._connection, schema.chunk, [self._chunk(*one) for one in self._chunks])
        # Two lengths of one table at one step make no sense, nor do two fingerprints of it: the
        # first stays. What a fingerprint says, another rank may have said.
        for table, rows in (
            (schema.layers, self._layers),
            (schema.fingerprint, self._fingerprints),
        ):
            add_missing_rows(self._connection, table, [_in_order(table, *one) for one in rows])
        add_missing_rows(
            self._connection,
            schema.print_content,
            [
                (self._run, step, content.key, content.digests, content.sketches)
                for (step, _), content in sorted(self._contents.items())
            ],
        )
        if self._events:
            events = [{**row, "attempt": process.attempt} for process, row in self._events]
            self._connection.execute(insert(schema.event), events)

    def _chunk(self, process: Process, rank: int, arrival: int, block: Block) -> Row:
        """A row of `chunk`, its columns in their order."""
        return (
            *(self._run, block.layout, rank, block.first_step, arrival, block.last_step),
            *(process.attempt, block.points, block.steps, block.values),
        )

    def _add_layers(self, batch: wire.Batch, process: Process, arrival: int) -> None:
        parts: dict[tuple[Series, int], dict[int, wire.Float64]] = defaultdict(dict)
        for made in batch.layers:
            if len(made.values):
                version = process.tables.get(made.table, "")
                series = Series("layers", made.metric, made.table, version)
                parts[series, len(made.values)][made.step] = made.values
        numbers = self._dictionary.numbers(self._connection, [series for series, _ in parts])
        for (series, tensors), by_step in parts.items():
            steps = np.array(sorted(by_step), dtype=np.int64)
            row = {
                "run": self._run,
                "metric": numbers[series],
                "rank": batch.rank,
                "first_step": int(steps[0]),
                "arrival": arrival,
                "last_step": int(steps[-1]),
                "points": len(steps),
                "tensors": tensors,
                "steps": pack_steps(steps),
                "values": pack(np.stack([by_step[int(step)] for step in steps], axis=1)),
            }
            self._layers.append((process, row))


def _in_order(table: Table, process: Process, row: dict[str, Any]) -> Row:
    row["attempt"] = process.attempt
    return tuple([row[name] for name in table.c.keys()])
