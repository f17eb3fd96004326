"""What numbers stand for: a run's series, and the sets of series that come together.

Numbers are given once and never changed, so that a process may remember what it has read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from sqlalchemy import Connection, insert, select

from rankscope.agent import wire
from rankscope.server.storage import schema
from rankscope.server.storage.database.packing import pack, unpack

# Sets of series that a run may have. A job that logs ever other sets has each series apart from
# then on: a set that comes once would cost more than it saves.
_MAX_SETS = 64
# Where a batch has the series of each kind.
_FIELDS = {"scalar": "columns", "word": "words", "layers": "layers"}
_MAX_RUNS = 1024


class Series(NamedTuple):
    """What a run's dictionary has a number for."""

    kind: str
    name: str
    table: str = ""
    version: str = ""


class Group(NamedTuple):
    """Some of a list of series, from `first` to before `end`, and the number of their set."""

    layout: int
    first: int
    end: int


@dataclass(slots=True)
class RunDictionary:
    """One run's numbers, as far as this process has read them."""

    run: int
    metrics: dict[Series, int] = field(default_factory=dict)
    layouts: dict[tuple[int, ...], int] = field(default_factory=dict)

    def numbers(self, connection: Connection, wanted: Collection[Series]) -> Mapping[Series, int]:
        """Numbers of series, given now where there is none yet.

        The caller holds the run's row, so one transaction at a time gives numbers.

        Raises:
            wire.WireError: the run has as many series as it can have.
        """
        if all(series in self.metrics for series in wanted):
            return self.metrics
        t = schema.metric
        # Another server may have given some.
        for row in connection.execute(select(t).where(t.c.run == self.run)):
            self.metrics[Series(row.kind, row.name, row.table, row.version)] = row.id
        missing = [series for series in dict.fromkeys(wanted) if series not in self.metrics]
        if missing:
            if len(self.metrics) + len(missing) > wire.limits.SERIES_OF_RUN.most:
                most = wire.limits.SERIES_OF_RUN.most
                what = missing[0]
                raise wire.WireError(
                    f"{_FIELDS.get(what.kind, 'columns')}.{what.name}",
                    f"the run has {len(self.metrics)} series already; it can have {most}",
                )
            first = max(self.metrics.values(), default=-1) + 1
            new = {series: first + n for n, series in enumerate(missing)}
            connection.execute(
                insert(t),
                [{"run": self.run, "id": n, **series._asdict()} for series, n in new.items()],
            )
            self.metrics |= new
        return self.metrics

    def grouped(self, connection: Connection, metrics: Sequence[int]) -> list[Group]:
        """How series with the same steps are stored, by their ascending numbers: mostly together.

        The caller holds the run's row.
        """
        together = tuple(metrics)
        if together not in self.layouts:
            # Another server may have added some.
            self.layouts = {of: n for n, of in read_layouts(connection, run=self.run).items()}
        if together in self.layouts or len(together) == 1 or self._has_room():
            return [Group(self._layout(connection, together), 0, len(together))]
        return [
            Group(self._layout(connection, (metric,)), n, n + 1)
            for n, metric in enumerate(together)
        ]

    def _has_room(self) -> bool:
        return sum(len(of) > 1 for of in self.layouts) < _MAX_SETS

    def _layout(self, connection: Connection, metrics: tuple[int, ...]) -> int:
        if metrics not in self.layouts:
            number = max(self.layouts.values(), default=-1) + 1
            packed = pack(np.array(metrics, dtype=np.int32))
            connection.execute(
                insert(schema.layout).values(run=self.run, id=number, metrics=packed)
            )
            self.layouts[metrics] = number
        return self.layouts[metrics]


class Dictionaries:
    """Those of the runs that this process writes to.

    What a transaction has added is true only once it is committed: `forget` after a rollback.
    """

    def __init__(self) -> None:
        self._runs: OrderedDict[tuple[int, str, float], RunDictionary] = OrderedDict()

    def of(self, run: int, name: str, started_at: float) -> RunDictionary:
        """That of a run; SQLite gives the key of a deleted run again, hence name and time."""
        identity = (run, name, started_at)
        found = self._runs.get(identity)
        if found is None:
            found = self._runs[identity] = RunDictionary(run)
            while len(self._runs) > _MAX_RUNS:
                self._runs.popitem(last=False)
        self._runs.move_to_end(identity)
        return found

    def forget(self) -> None:
        """Forgets everything."""
        self._runs.clear()


def read_layouts(connection: Connection, *, run: int) -> dict[int, tuple[int, ...]]:
    """Numbers of the series of each set, by the number of the set."""
    t = schema.layout
    return {
        row.id: tuple(unpack(row.metrics, np.int32).tolist())
        for row in connection.execute(select(t.c.id, t.c.metrics).where(t.c.run == run))
    }


def places_of(layouts: Mapping[int, tuple[int, ...]], metric: int) -> dict[int, int]:
    """Where a series stands in the sets that it is in, by the number of the set."""
    return {number: of.index(metric) for number, of in layouts.items() if metric in of}
