"""A log of another tool as the batches that an agent of each rank would have sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b

import numpy as np

from rankscope.agent import wire
from rankscope.agent.wire import Column
from rankscope.server.exchange.logs import Log

_MOST_STEPS = 2_000
_MOST_SERIES = 5_000
_MOST_POINTS = 1_000_000


def batches(log: Log, names: Mapping[str, str], *, run: str, project: str) -> Iterator[wire.Batch]:
    """The batches, some steps of all ranks at a time: no rank is to seem late to the server.

    A process's session follows from all it has logged: the same log is stored once, and one that
    has grown since is a new launch of the job, which is judged anew from its beginning.

    Args:
        names: tag -> name of the metric, for every tag.
    """
    ranks = {
        rank: {names[tag]: column for tag, column in sorted(columns.items())}
        for rank, columns in log.ranks.items()
    }
    sessions = {rank: _session(columns) for rank, columns in ranks.items()}
    seqs = dict.fromkeys(ranks, 0)
    rounds = list(_rounds(ranks))
    for number, (first, last) in enumerate(rounds):
        for rank, columns in ranks.items():
            parts = list(_parts(_between(columns, first, last)))
            for part_number, part in enumerate(parts):
                whole = part_number == len(parts) - 1
                yield wire.Batch(
                    run=run,
                    project=project,
                    rank=rank,
                    world_size=len(ranks),
                    session=sessions[rank],
                    seq=seqs[rank],
                    through_step=last if whole else first - 1,
                    state="finished" if whole and number == len(rounds) - 1 else "running",
                    hello=_hello(log) if not seqs[rank] else None,
                    columns=part,
                )
                seqs[rank] += 1


def _hello(log: Log) -> wire.Hello:
    config = {"imported_from": log.source, "logged_with": log.tool}
    return wire.Hello(started_at=log.started_at, launcher="import", config=config)


def _session(columns: Mapping[str, Column]) -> str:
    content = blake2b(digest_size=16)
    for name, column in columns.items():
        content.update(f"{name}\0{len(column.steps)}\0".encode("utf-8", "replace"))
        content.update(column.steps.astype("<i8").tobytes())
        content.update(column.values.astype("<f8").tobytes())
    return f"import-{content.hexdigest()}"


def _rounds(ranks: Mapping[int, Mapping[str, Column]]) -> Iterator[tuple[int, int]]:
    """First and last step of each round."""
    # Most series have the same steps: one array of each kind is enough.
    different = {c.steps.tobytes(): c.steps for of in ranks.values() for c in of.values()}
    steps = np.unique(np.concatenate(list(different.values())))
    most = min(_MOST_SERIES, max(map(len, ranks.values())))
    width = max(1, min(_MOST_STEPS, _MOST_POINTS // most))
    for begin in range(0, len(steps), width):
        some = steps[begin : begin + width]
        yield int(some[0]), int(some[-1])


def _between(columns: Mapping[str, Column], first: int, last: int) -> dict[str, Column]:
    found = {}
    for name, column in columns.items():
        begin, end = np.searchsorted(column.steps, [first, last + 1])
        if begin < end:
            found[name] = Column(column.steps[begin:end], column.values[begin:end])
    return found


def _parts(columns: dict[str, Column]) -> Iterator[dict[str, Column]]:
    """At least one, of no more series than a batch may have."""
    items = list(columns.items())
    for begin in range(0, max(1, len(items)), _MOST_SERIES):
        yield dict(items[begin : begin + _MOST_SERIES])
