"""What the agents say of themselves: what they sample when, what it costs, and what went wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import Connection, select

from rankscope.server.storage import schema
from rankscope.server.storage.reading.series import latest_values

_OWN = "rankscope/"
_OVERHEAD = f"{_OWN}overhead"
_SAMPLED = f"{_OWN}sampled"
_INTERVAL = f"{_OWN}interval/"
# Faults are reported once a process and probe; more different ones than this nobody reads.
_MAX_FAULTS = 100


@dataclass(slots=True)
class Sampling:
    """The plan of one rank, as it last said.

    Attributes:
        overhead: share of the step time that the agent takes; None where it has not said yet.
        sampled: share of the steps so far that were sampled in full; None where it has not said.
        intervals: steps from one sampling to the next, by tier.
    """

    overhead: float | None = None
    sampled: float | None = None
    intervals: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Fault:
    """Something that agents could not do, as they describe it.

    Attributes:
        ranks: those that said so, ascending.
        step, at: when the first of them did; steps are -1 before the first.
    """

    text: str
    ranks: list[int]
    step: int
    at: float


def sampling(connection: Connection, *, run: int) -> dict[int, Sampling]:
    """Plans by rank; of ranks that have reported theirs."""
    names = plan_series(connection, run=run)
    return plans_of(latest_values(connection, run=run, metrics=names))


def plan_series(connection: Connection, *, run: int) -> Sequence[str]:
    """Names of the series in which the ranks of a run report their plans."""
    m = schema.metric
    return connection.scalars(
        select(m.c.name).where(
            m.c.run == run,
            m.c.kind == "scalar",
            m.c.name.in_((_OVERHEAD, _SAMPLED)) | m.c.name.startswith(_INTERVAL, autoescape=True),
        )
    ).all()


def plans_of(latest: Mapping[tuple[int, str], float]) -> dict[int, Sampling]:
    """Plans by rank, of the latest values of series, by (rank, name); others are passed over."""
    found: dict[int, Sampling] = {}
    for (rank, name), value in latest.items():
        if not name.startswith(_OWN):
            continue
        plan = found.get(rank)
        if plan is None:
            plan = found[rank] = Sampling()
        if name == _OVERHEAD:
            plan.overhead = value
        elif name == _SAMPLED:
            plan.sampled = value
        elif name.startswith(_INTERVAL) and 1 <= value < 2**53:
            plan.intervals[name.removeprefix(_INTERVAL)] = int(value)
    for plan in found.values():
        plan.intervals = dict(sorted(plan.intervals.items()))
    return dict(sorted(found.items()))


def faults(connection: Connection, *, run: int) -> list[Fault]:
    """Faults of the agents, oldest first; what several ranks say alike is reported once."""
    e = schema.event
    rows = connection.execute(
        select(e.c.rank, e.c.step, e.c.at, e.c.text)
        .where(e.c.run == run, e.c.kind == "agent.fault")
        .order_by(e.c.arrival, e.c.n)
    )
    found: dict[str, Fault] = {}
    for row in rows:
        known = found.get(row.text)
        if known is None:
            found[row.text] = Fault(row.text, [row.rank], row.step, row.at)
        else:
            known.ranks.append(row.rank)
    shown = list(found.values())[:_MAX_FAULTS]
    for fault in shown:
        fault.ranks = sorted(set(fault.ranks))
    return shown


def dropped(counters: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """What the agents gave up, by reason, over all ranks; `counters` are those of each."""
    total: Counter[str] = Counter()
    for counted in counters:
        total.update(counted)
    return {reason: number for reason, number in sorted(total.items()) if number}
