"""Values that wait for their step to be complete, many ranks and series in one array."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np

from rankscope.agent.wire import Array
from rankscope.server.window import Bool, Columns, Int64, LayerNumbers, LayerPart, Series


class Pending:
    """Values of one kind, float64 or uint64, that are not in a window yet."""

    def __init__(self, dtype: type[Any]) -> None:
        self._dtype = np.dtype(dtype)
        self._held: list[Columns] = []

    def add(self, part: Columns) -> None:
        """Takes values of some ranks."""
        self._held.append(part)

    def steps(self) -> list[Int64]:
        """The steps of what waits, in arrays that may overlap."""
        # What came together shares the array of its steps.
        return [*{id(part.steps): part.steps for part in self._held}.values()]

    def forget(self, superseded: Mapping[tuple[int, int], int]) -> None:
        """Drops what later attempts of the same ranks have said anew.

        Args:
            superseded: rank and attempt -> first step from which a later one's values count.
        """
        attempts = {attempt for _, attempt in superseded}
        held, self._held = self._held, []
        for part in held:
            if part.attempt not in attempts:
                self._held.append(part)
                continue
            firsts = [superseded.get((rank, part.attempt), inf) for rank in part.ranks.tolist()]
            ends = np.searchsorted(part.steps, np.array(firsts))
            for end in np.unique(ends[ends > 0]).tolist():
                rows = ends == end
                self._held.append(
                    replace(
                        part,
                        ranks=part.ranks[rows],
                        arrivals=part.arrivals[rows],
                        steps=part.steps[:end],
                        values=part.values[rows, :, :end],
                    )
                )

    def take(self, ranks: Int64, steps: Int64, through: int) -> dict[str, Series]:
        """What waits at steps up to `through`, by series.

        Args:
            ranks: all that there are, ascending.
            steps: all up to `through` at which something waits, ascending.
        """
        due: list[Columns] = []
        held, self._held = self._held, []
        for part in held:
            if part.steps[-1] <= through:
                due.append(part)
            elif part.steps[0] > through:
                self._held.append(part)
            else:
                end = int(np.searchsorted(part.steps, through, side="right"))
                due.append(replace(part, steps=part.steps[:end], values=part.values[..., :end]))
                self._held.append(
                    replace(part, steps=part.steps[end:], values=part.values[..., end:])
                )
        if not due:
            return {}
        names = sorted({name for part in due for name in part.names})
        row_of = {name: row for row, name in enumerate(names)}
        values = np.zeros((len(names), len(ranks), len(steps)), self._dtype)
        present = np.zeros(values.shape, dtype=bool)
        count = 0
        for part in due:
            _put(values, present, part, row_of, ranks, steps)
            count += part.values.size
        if np.count_nonzero(present) < count:
            # A rank has posted a step more than once.
            for part in _in_order(due):
                _put(values, present, part, row_of, ranks, steps)
        return {name: Series(values[n], present[n]) for name, n in row_of.items()}


class PendingLayers:
    """Numbers of single tensors that are not in a window yet."""

    def __init__(self) -> None:
        # By step, then by metric, table and rank; with the attempt that posted it.
        self._held: dict[int, dict[tuple[str, str, int], tuple[int, LayerNumbers]]] = {}

    def add(self, part: LayerPart, after: int) -> None:
        """Takes what one rank posted of one metric, of the steps after `after`."""
        for column, step in enumerate(part.steps.tolist()):
            if step <= after:
                continue
            held = self._held.setdefault(step, {})
            key = (part.metric, part.name, part.rank)
            if key in held and held[key][0] > part.attempt:
                continue
            made = LayerNumbers(
                step=step,
                rank=part.rank,
                metric=part.metric,
                table=part.table,
                # A copy: a view would hold all that came with it.
                values=np.array(part.values[:, column]),
            )
            held[key] = (part.attempt, made)

    def steps(self) -> Int64:
        """The steps of what waits."""
        return np.array([*self._held], dtype=np.int64)

    def take(
        self, through: int, begins: Mapping[int, Mapping[int, int]]
    ) -> tuple[LayerNumbers, ...]:
        """What waits at steps up to `through`, in order, but for what was said anew since.

        Args:
            begins: first step of each attempt of each rank.
        """
        found = []
        for step in sorted(s for s in self._held if s <= through):
            held = self._held.pop(step)
            found += [
                made
                for (_, _, rank), (attempt, made) in sorted(held.items(), key=lambda item: item[0])
                if step < superseded_from(attempt, begins.get(rank, {}))
            ]
        return tuple(found)


def _put(
    values: Array,
    present: Bool,
    part: Columns,
    row_of: Mapping[str, int],
    ranks: Int64,
    steps: Int64,
) -> None:
    """Puts values [N, M, S] where they belong in all of them, [M, R, S]."""
    place = np.ix_(
        np.array([row_of[name] for name in part.names]),
        np.searchsorted(ranks, part.ranks),
        np.searchsorted(steps, part.steps),
    )
    values[place] = part.values.transpose(1, 0, 2)
    present[place] = True


def _in_order(parts: Iterable[Columns]) -> list[Columns]:
    """Rank by rank, so that what stands comes last: the newest attempt's last to arrive."""
    single = [
        replace(
            part,
            ranks=part.ranks[n : n + 1],
            arrivals=part.arrivals[n : n + 1],
            values=part.values[n : n + 1],
        )
        for part in parts
        for n in range(len(part.ranks))
    ]
    return sorted(single, key=lambda part: (part.attempt, int(part.arrivals[0])))


def superseded_from(attempt: int, begins: Mapping[int, int]) -> float:
    """First step from which a later attempt's points count."""
    return min((first for later, first in begins.items() if later > attempt), default=inf)
