"""The starts of a run: which of its processes belong to one launch of the whole job.

A job that is launched again under the same run id, and begins again where it had begun, is judged
anew: by its last start alone. One that goes on from a checkpoint, and a rank that is replaced while
others live on, belong to the start before.

A start is a group of processes whose times overlap, or several: those that follow a gap, in which
no process of the job lived, begin a new one if they begin no later than the start before did. One
process may train several times, one after the other: each is a start, judged from its own first
step, but all are one launch, and what was found in any of them counts.
Everything follows from the rows of the processes, whatever the order in which they reported.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from sqlalchemy import Connection, bindparam, func, select, update

from rankscope.server.storage import schema

# A process that says nothing for so long before all others of a later group began is lost: as long
# as a run whose ranks are all silent is waited for.
LOST_SECONDS = 30.0
# A gap of this many times the typical one, or the longest, is no silence yet.
TYPICAL_GAPS, LONGEST_GAPS = 10.0, 3.0

_A = schema.attempt.c
_READ = (
    *(_A.rank, _A.session, _A.attempt, _A.host, _A.started_at, _A.sent_at, _A.first_seen),
    *(
        _A.boot,
        _A.steady,
        _A.set_ahead,
        _A.last_seen,
        _A.first_step,
        _A.last_step,
        _A.state,
        _A.typical_gap,
        _A.longest_gap,
    ),
    _A.start,
)


@dataclass(frozen=True, slots=True)
class Starts:
    """The starts of a run.

    Attributes:
        of: rank and session -> number of its start, counted from 0.
        last: number of the last one.
        first: number of the first one of the same launch, mostly the last one itself.
        resumed_step: least step at which a rank went on with the last one from a checkpoint, the
            last time that all processes had ended; None where that did not happen.
    """

    of: Mapping[tuple[int, str], int]
    last: int = 0
    first: int = 0
    resumed_step: int | None = None


@dataclass(slots=True)
class _Group:
    """Processes whose times overlap, in the order in which they began."""

    processes: list[Any] = field(default_factory=list)

    @property
    def begun(self) -> dict[int, int]:
        """First step of the first process of each rank, as far as it is known."""
        first: dict[int, Any] = {}
        for process in self.processes:
            first.setdefault(process.rank, process)
        return {rank: p.first_step for rank, p in first.items() if p.first_step is not None}

    @property
    def ranks(self) -> set[int]:
        return {process.rank for process in self.processes}

    @property
    def trainers(self) -> set[tuple[int, str]]:
        """Rank and what the sessions of one process have in common, where they report."""
        named = ((p.rank, p.session.rpartition(".")[0]) for p in self.processes)
        return {(rank, trainer) for rank, trainer in named if trainer}


def starts(processes: Sequence[Any], world_size: int) -> Starts:
    """Distinguishes the starts of a run.

    Args:
        processes: rows of `schema.attempt`.
        world_size: number of ranks that the job has now.
    """
    of: dict[tuple[int, str], int] = {}
    number, first, resumed_step = 0, 0, None
    # Of the current start: its ranks, and the least step at which one began.
    ranks: set[int] = set()
    trainers: set[tuple[int, str]] = set()
    least: float = inf
    for group in _groups(processes, world_size):
        begun = group.begun
        if ranks & group.ranks and begun:
            if max(begun.values()) <= least:
                number, resumed_step, ranks, least = number + 1, None, set(), inf
                if not trainers & group.trainers:
                    first, trainers = number, set()
            else:
                resumed_step = min(begun.values())
        ranks |= group.ranks
        trainers |= group.trainers
        for process in group.processes:
            of[process.rank, process.session] = number
            if process.first_step is not None:
                least = min(least, process.first_step)
            elif process.last_step >= 0:
                least = -1  # from before first steps were noted: nobody knows where it began
    return Starts(of, number, first, resumed_step)


def refresh(connection: Connection, *, run: int, world_size: int) -> Starts:
    """Distinguishes the starts of a run anew, and notes with each process to which it belongs.

    The caller holds the run's row.
    """
    rows = connection.execute(select(*_READ).where(_A.run == run)).all()
    found = starts(rows, world_size)
    wrong = [row for row in rows if row.start != found.of[row.rank, row.session]]
    if wrong:
        t = schema.attempt
        connection.execute(
            update(t).where(
                t.c.run == run,
                t.c.rank == bindparam("its_rank"),
                t.c.session == bindparam("its_session"),
            ),
            [
                {
                    "its_rank": row.rank,
                    "its_session": row.session,
                    "start": found.of[row.rank, row.session],
                }
                for row in wrong
            ],
        )
    return found


def may_have_several(connection: Connection, *, run: int) -> bool:
    """Whether any rank of a run has had a second process."""
    again = select(_A.rank).where(_A.run == run, _A.attempt > 0).limit(1)
    return connection.execute(again).first() is not None


def last_step(connection: Connection, *, run: int, start: int) -> int:
    """Last step that any process of a start has said anything about; -1 for none."""
    found = connection.scalar(
        select(func.max(_A.last_step)).where(_A.run == run, _A.start == start)
    )
    return -1 if found is None else int(found)


def first_attempts(connection: Connection, *, run: int, start: int) -> tuple[dict[int, int], int]:
    """The number of each rank's first process in a start, and when the first of these came.

    Returns:
        By rank, and the number of the arrival; empty and 0 for a start that has no process.
    """
    rows = connection.execute(
        select(_A.rank, func.min(_A.attempt), func.min(_A.first_arrival))
        .where(_A.run == run, _A.start == start)
        .group_by(_A.rank)
    ).all()
    return {row[0]: row[1] for row in rows}, min((row[2] for row in rows), default=0)


def _groups(processes: Sequence[Any], world_size: int) -> list[_Group]:
    groups: list[_Group] = []
    reach = -inf
    timed = _times(processes, world_size)
    for begin, end, process in sorted(timed, key=lambda t: (t[0], t[2].attempt, t[2].rank)):
        if begin >= reach:
            groups.append(_Group())
        groups[-1].processes.append(process)
        reach = max(reach, end)
    return groups


def _times(processes: Sequence[Any], world_size: int) -> Iterable[tuple[float, float, Any]]:
    """When each process began and ended, seconds since 1970 on the server's clock."""
    offsets: dict[tuple[str, str], float] = defaultdict(lambda: inf)
    for p in processes:
        if (own := _own_times(p)) is not None:
            # What is between two clocks, and the way of a message: the fastest is the best
            # estimate.
            clock, began, sent = own
            offsets[clock] = min(offsets[clock], p.first_seen - began, p.last_seen - sent)
    by_rank: dict[int, list[Any]] = defaultdict(list)
    for p in sorted(processes, key=lambda p: p.attempt):
        by_rank[p.rank].append(p)
    for of_rank in by_rank.values():
        before = -inf
        for n, p in enumerate(of_rank):
            begin, end = p.first_seen, p.last_seen
            if (own := _own_times(p)) is not None:
                # What a process made may come long after it, from the disk.
                clock, began, sent = own
                begin, end = began + offsets[clock], sent + offsets[clock]
            begin = before = max(begin, before)
            newest = n == len(of_rank) - 1
            if newest and p.state == "running" and p.rank < world_size:
                # Nobody has taken its place, and it has not said that it ends.
                patience = (TYPICAL_GAPS * p.typical_gap, LONGEST_GAPS * p.longest_gap)
                end += max(LOST_SECONDS, *patience)
            yield begin, max(begin, end), p


def _own_times(process: Any) -> tuple[tuple[str, str], float, float] | None:
    """By which clock a process began and last made a batch, and when; None where it has not said.

    One that runs since its machine's boot, where it has reported that: nobody sets it.
    """
    if process.boot:
        sent = process.sent_at - process.set_ahead
        return ("boot", process.boot), process.steady, max(sent, process.steady)
    if process.started_at > 0 and process.sent_at >= process.started_at:
        return ("host", process.host), process.started_at, process.sent_at
    return None
