"""The processes of a rank: numbered in the order in which they began, each with its signs of life.

A rank that restarts posts as another session and gets another attempt. What an earlier process left
on disk may arrive after what a later one posted; it still comes before it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import JSON, Connection, insert, select, update
from sqlalchemy.engine import Dialect

from rankscope.agent import wire
from rankscope.server.storage import schema
from rankscope.server.storage.database.plain import plain
from rankscope.server.storage.ingest.tables import store_tables

# How fast the estimate of the typical gap between posts follows: a stochastic approximation of the
# median moves by this share of itself towards each new gap.
_GAP_GAIN = 0.1


@dataclass(frozen=True, slots=True)
class Met:
    """What is known of the process that posted a batch.

    Attributes:
        process: whose `attempt` may still rise until the attempts are written.
        latest: whether the batch is the last report of the newest process of its rank.
        hello_wanted: nothing is known of it but that it is there.
        last_step: last step that the batch says anything about; -1 for none.
    """

    process: Process
    latest: bool
    hello_wanted: bool
    last_step: int


class Process:
    """One process of a rank: its row, with what is not written yet.

    Attributes:
        row: of what is needed here, by column.
        changed: columns that are to be written; all of them for a new process.
    """

    __slots__ = ("changed", "known", "row")

    def __init__(self, row: dict[str, Any], *, known: bool) -> None:
        self.row = row
        self.known = known
        self.changed: dict[str, Any] = {}

    @property
    def attempt(self) -> int:
        """Its number among those of its rank, in the order in which they began."""
        number: int = self.row["attempt"]
        return number

    @property
    def tables(self) -> Mapping[str, str]:
        """Name of each of its tensor tables -> version."""
        tables: Mapping[str, str] = self.row["tables"]
        return tables

    def set(self, values: Mapping[str, Any]) -> None:
        """Changes the row."""
        self.row.update(values)
        self.changed.update(values)


# Of these it depends what a batch changes.
_NEEDED = tuple(
    schema.attempt.c[name]
    for name in (
        *("rank", "session", "attempt", "last_seq", "first_seq", "end_seq", "taken_end"),
        *(
            "sent_at",
            "host",
            "started_at",
            "boot",
            "steady",
            "last_seen",
            "longest_gap",
            "typical_gap",
        ),
        *("first_step", "last_step", "through_step", "hello_arrival", "tables"),
        *("state", "start"),
    )
)


class Attempts:
    """The processes of some ranks of a run, read once for many batches and written once.

    The caller holds the run's row.

    Args:
        start: number of the run's last start.

    Attributes:
        moved: whether something was said that reports one start of the job from another: a process
            began, where it began, or that it has ended.
    """

    def __init__(
        self, connection: Connection, *, run: int, ranks: Collection[int], start: int = 0
    ) -> None:
        self._connection = connection
        self._run = run
        self._start = start
        self.moved = False
        self._by_rank: dict[int, list[Process]] = {rank: [] for rank in ranks}
        self._taken: list[dict[str, Any]] = []
        t = schema.attempt
        for row in connection.execute(
            select(*_NEEDED).where(t.c.run == run, t.c.rank.in_(list(ranks))).order_by(t.c.attempt)
        ):
            self._by_rank[row.rank].append(Process(dict(row._mapping), known=True))

    def has(self, batch: wire.Batch) -> bool:
        """Whether a batch is stored already."""
        process = self._of(batch)
        if process is None:
            return False
        row = process.row
        if row["first_seq"] <= batch.seq < row["end_seq"]:
            return True
        if batch.seq >= row["taken_end"]:
            return False
        if any(
            taken["first_seq"] <= batch.seq < taken["end_seq"]
            for taken in self._taken
            if (taken["rank"], taken["session"]) == (batch.rank, batch.session)
        ):
            return True
        t = schema.taken
        last = self._connection.scalar(
            select(t.c.end_seq)
            .where(
                t.c.run == self._run,
                t.c.rank == batch.rank,
                t.c.session == batch.session,
                t.c.first_seq <= batch.seq,
            )
            .order_by(t.c.first_seq.desc())
            .limit(1)
        )
        return last is not None and last > batch.seq

    def meet(self, batch: wire.Batch, *, arrival: int, received_at: float) -> Met:
        """Notes a sign of life, and that the batch is stored."""
        processes = self._by_rank[batch.rank]
        tables: dict[str, str] = {}
        if batch.hello is not None:
            tables = store_tables(self._connection, run=self._run, tables=batch.hello.tables)
        process = self._of(batch)
        last, first = last_step(batch), first_step(batch)
        if process is None:
            self.moved = True
            latest, hello_wanted = True, batch.hello is None
            process = self._begin(
                batch, last, first, arrival=arrival, received_at=received_at, tables=tables
            )
        else:
            row = process.row
            if (began := _earlier(row, first)) is not None:
                self.moved = True
                process.set({"first_step": began})
            # Of one that has been replaced, what comes is late: it is not seen any more.
            seen_at, sent_at = row["last_seen"], row["sent_at"]
            if process is processes[-1]:
                seen_at, sent_at = received_at, batch.sent_at
            # Batches may overtake each other: the last report is that of the highest number.
            latest = place(batch.seq) > row["last_seq"]
            self.moved |= latest and batch.state != row["state"]
            hello_wanted = batch.hello is None and row["hello_arrival"] is None
            process.set(
                {
                    **_gaps(row, batch, received_at),
                    **_hello(batch, arrival, received_at),
                    **(_said(batch) if latest else {}),
                    **self._count(process, batch),
                    "last_seq": max(row["last_seq"], place(batch.seq)),
                    "last_seen": max(row["last_seen"], seen_at),
                    "sent_at": max(row["sent_at"], sent_at),
                    "last_step": max(row["last_step"], last),
                    "through_step": max(row["through_step"], batch.through_step),
                }
            )
            if tables:
                process.set({"tables": {**process.tables, **tables}})
        newest = all(other.attempt <= process.attempt for other in processes)
        return Met(process, latest and newest, hello_wanted, last)

    def write(self) -> None:
        """Writes what has changed."""
        new: list[dict[str, Any]] = []
        changed: dict[tuple[str, ...], list[tuple[Any, ...]]] = {}
        for rank, processes in self._by_rank.items():
            for process in processes:
                if not process.known:
                    new.append({"run": self._run, **process.row})
                    process.known = True
                elif process.changed:
                    names = tuple(sorted(process.changed))
                    values = [
                        json.dumps(process.changed[name])
                        if name in _JSON and process.changed[name] is not None
                        else process.changed[name]
                        for name in names
                    ]
                    row = (*values, self._run, rank, process.row["session"])
                    changed.setdefault(names, []).append(row)
                process.changed = {}
        if new:
            self._connection.execute(insert(schema.attempt), new)
        for names, rows in changed.items():
            self._connection.exec_driver_sql(_change(self._connection.dialect, names), rows)
        if self._taken:
            self._connection.execute(insert(schema.taken), self._taken)
            self._taken = []

    def _of(self, batch: wire.Batch) -> Process | None:
        for process in self._by_rank[batch.rank]:
            if process.row["session"] == batch.session:
                return process
        return None

    def _begin(
        self,
        batch: wire.Batch,
        last: int,
        first: int | None,
        *,
        arrival: int,
        received_at: float,
        tables: Mapping[str, str],
    ) -> Process:
        processes = self._by_rank[batch.rank]
        number = self._number(batch)
        made = Process(
            {
                **_UNKNOWN,
                "rank": batch.rank,
                "session": batch.session,
                "attempt": number,
                "last_seq": place(batch.seq),
                "first_seq": batch.seq,
                "end_seq": batch.seq + 1,
                "taken_end": 0,
                "started_at": received_at,
                "first_seen": received_at,
                "last_seen": received_at,
                "sent_at": batch.sent_at,
                "first_step": first,
                "last_step": last,
                "through_step": batch.through_step,
                "first_arrival": arrival,
                "start": self._start,
                "tables": dict(tables),
                **_said(batch),
                **_hello(batch, arrival, received_at),
            },
            known=False,
        )
        processes.append(made)
        processes.sort(key=lambda process: process.attempt)
        return made

    def _count(self, process: Process, batch: wire.Batch) -> dict[str, int]:
        """The ranges of stored numbers, with one more."""
        row, seq = process.row, batch.seq
        if seq == row["end_seq"]:
            return {"end_seq": seq + 1}
        self._taken.append(
            {
                "run": self._run,
                "rank": batch.rank,
                "session": batch.session,
                "first_seq": row["first_seq"],
                "end_seq": row["end_seq"],
            }
        )
        return {
            "first_seq": seq,
            "end_seq": seq + 1,
            "taken_end": max(row["taken_end"], row["end_seq"]),
        }

    def _number(self, batch: wire.Batch) -> int:
        """Number of a new attempt: after those that began before it, as far as clocks show.

        What was heard first began first, unless a clock says otherwise that nobody sets, back for
        example; one that may be set counts only between processes that report no other.
        """
        processes = self._by_rank[batch.rank]
        at_least = batch.attempt or 0
        later = None
        if (hello := batch.hello) is not None and not math.isnan(hello.started_at):
            later = next((p.attempt for p in processes if _began_later(p.row, hello)), None)
        if later is None:
            return max(at_least, processes[-1].attempt + 1 if processes else 0)
        before = max((p.attempt for p in processes if p.attempt < later), default=-1)
        number = min(max(before + 1, at_least), later - 1)
        if number > before:
            return number
        self._make_room(batch.rank, later)
        return later

    def _make_room(self, rank: int, number: int) -> None:
        by_number = {process.attempt: process for process in self._by_rank[rank]}
        end = number
        while end in by_number:
            end += 1
        # From the last on, so that no two attempts have the same number in between.
        for one in range(end - 1, number - 1, -1):
            by_number[one].row["attempt"] = one + 1
            for t in (
                *(schema.attempt, schema.chunk, schema.layers, schema.fingerprint),
                schema.event,
            ):
                self._connection.execute(
                    update(t)
                    .where(t.c.run == self._run, t.c.rank == rank, t.c.attempt == one)
                    .values(attempt=one + 1)
                )


def _began_later(row: Mapping[str, Any], hello: wire.Hello) -> bool:
    """Whether a process began after one that says hello, by a clock that both of them have."""
    if row["boot"] or hello.boot:
        return bool(row["boot"] == hello.boot and row["steady"] > hello.steady)
    # The clocks of two machines need not agree.
    return bool(row["host"] == hello.host and row["started_at"] > hello.started_at)


@lru_cache(maxsize=64)
def _change(dialect: Dialect, names: tuple[str, ...]) -> str:
    """The statement that sets these columns of a process, as the driver takes it.

    Its arguments are the values in this order, run, rank and session. A process changes with every
    batch, and SQLAlchemy looks at each value of each row on its way.
    """
    t, quoted = schema.attempt, dialect.identifier_preparer
    mark = "%s" if dialect.name == "postgresql" else "?"
    new = ", ".join(f"{quoted.format_column(t.c[name])} = {mark}" for name in names)
    key = (t.c.run, t.c.rank, t.c.session)
    where = " AND ".join(f"{quoted.format_column(column)} = {mark}" for column in key)
    return f"UPDATE {quoted.format_table(t)} SET {new} WHERE {where}"


# The driver takes these as text.
_JSON = frozenset(c.name for c in schema.attempt.c if isinstance(c.type, JSON))

# A process that has not said hello.
_UNKNOWN: dict[str, Any] = {
    "host": "",
    "pid": 0,
    "local_rank": 0,
    "launcher": "",
    "wrapper": "",
    "heartbeat_seconds": 5.0,
    "boot": "",
    "steady": 0.0,
    "set_ahead": 0.0,
    "longest_gap": 0.0,
    "typical_gap": 0.0,
    "config": None,
    "hello_arrival": None,
}


def place(seq: int) -> int:
    """Where a batch stands among those of its process.

    The pieces of one that had to be split have its number in the lower 32 bits and their own in the
    upper ones; they stand where it stood, and not behind all that came after it.
    """
    return min((seq & 0xFFFFFFFF) << 32 | seq >> 32, 2**63 - 1)


def last_step(batch: wire.Batch) -> int:
    """Last step that a batch says anything about; -1 for none."""
    # Columns of the same steps share one array.
    steps = {id(c.steps): c.steps for c in batch.columns.values() if len(c.steps)}
    last = [int(of.max()) for of in steps.values()]
    return max([batch.through_step, *last, *(made.step for made in batch.layers)])


def first_step(batch: wire.Batch) -> int | None:
    """First step that a batch says anything about; None for none."""
    columns = (*batch.columns.values(), *batch.words.values())
    # Columns of the same steps share one array.
    steps = {id(c.steps): c.steps for c in columns if len(c.steps)}
    first = [int(of.min()) for of in steps.values()]
    first += [step for step, _ in (*batch.rows, *batch.word_rows)]
    first += [*(made.step for made in batch.prints), *(made.step for made in batch.layers)]
    return max(min(first), 0) if first else None


def _earlier(row: Mapping[str, Any], first: int | None) -> int | None:
    """A process's first step, where a batch reports an earlier one than was known."""
    known = row["first_step"]
    if first is None or (known is not None and known <= first):
        return None
    # One that is older than the column has said other things before.
    return None if known is None and row["last_step"] >= 0 else first


def begun(hello: wire.Hello, received_at: float) -> float:
    """When a process began, by its own clock as far as that can be."""
    if math.isnan(hello.started_at):
        return received_at
    return min(max(hello.started_at, 0.0), received_at)


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
        **_steady(hello),
        # A hello that comes again for its tables need not repeat the rest.
        **({"config": plain(hello.config)} if hello.config else {}),
        "hello_arrival": arrival,
    }


def _steady(hello: wire.Hello) -> dict[str, Any]:
    if not hello.boot or math.isnan(hello.started_at):
        return {}
    return {
        "boot": hello.boot,
        "steady": hello.steady,
        "set_ahead": hello.started_at - hello.steady,
    }


def _gaps(row: Mapping[str, Any], batch: wire.Batch, received_at: float) -> dict[str, float]:
    gap = max(received_at - row["last_seen"], 0.0)
    if batch.sent_at > 0 and row["sent_at"] > 0:
        # While the server was away the rank was not silent: it could not be heard.
        gap = min(gap, max(batch.sent_at - row["sent_at"], 0.0))
    typical = row["typical_gap"] or gap
    if gap != typical:
        typical *= 1 + (_GAP_GAIN if gap > typical else -_GAP_GAIN)
    return {"longest_gap": max(row["longest_gap"], gap), "typical_gap": typical}
