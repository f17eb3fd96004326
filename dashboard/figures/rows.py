"""Many ranks on few rows: suspect ranks have rows of their own, the others share some."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankscope.dashboard.figures.arrays import rank_list
from rankscope.dashboard.figures.theme import Theme
from rankscope.dashboard.figures.ticks import rank_ticks

Array = npt.NDArray[Any]

# A chart of 400 pixels shows a row of three pixels each: beyond, rows would vanish between them.
MOST_ROWS = 128
_SUSPECT_ROWS = 32
_OTHER_ROWS = 64
# Ticks of ranks that stand apart, and of the others.
_MOST_TICKS = 16


@dataclass(frozen=True, slots=True)
class Rows:
    """Which ranks each row of a chart shows; R ranks on Q rows.

    Attributes:
        ranks: [R], ascending.
        order: int64 [R]: places of the ranks, row by row from the top.
        starts: int64 [Q]: where in `order` each row begins.
        own: number of rows at the top that show suspect ranks; 0 where all ranks have a row.
    """

    ranks: tuple[int, ...]
    order: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    own: int

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def grouped(self) -> bool:
        """Whether there are rows of several ranks."""
        return len(self.starts) < len(self.ranks)

    def members(self, row: int) -> list[int]:
        """The ranks of a row."""
        end = self.starts[row + 1] if row + 1 < len(self.starts) else len(self.order)
        return [self.ranks[place] for place in self.order[self.starts[row] : end]]

    def names(self) -> list[str]:
        """`rank 7`, or `ranks 0-15`, of each row."""
        members = [self.members(row) for row in range(len(self))]
        return [f"rank{'s' if len(of) > 1 else ''} {rank_list(of)}" for of in members]

    def row_of(self) -> dict[int, int]:
        """The row that each rank is on."""
        return {rank: row for row in range(len(self)) for rank in self.members(row)}

    def largest(self, cells: Array) -> Array:
        """[R, ...] to [Q, ...]: the largest cell of each row; of bool, whether any is true."""
        return np.asarray(np.maximum.reduceat(cells[self.order], self.starts, axis=0))

    def farthest(self, cells: Array, center: Array) -> Array:
        """[R, S] to [Q, S]: of each row the cell that lies farthest from `center` [S].

        Cells that are no numbers take no part; a row without any other has NaN.
        """
        away = np.abs(cells - center)
        away = np.where(np.isnan(away), -1.0, away)[self.order]
        shown = cells[self.order]
        ends = np.append(self.starts[1:], len(self.order))
        result = np.empty((len(self), cells.shape[1]))
        for row, (start, end) in enumerate(zip(self.starts, ends, strict=True)):
            chosen = start + np.argmax(away[start:end], axis=0)
            result[row] = shown[chosen, np.arange(cells.shape[1])]
        return result

    def axis(self, named: Collection[int]) -> dict[str, Any]:
        """Ticks that name the rows; `named` ranks have one where there is room."""
        if not self.grouped:
            return rank_ticks(self.ranks, list(named), _MOST_TICKS)
        stride = 1
        while self.own > stride * _MOST_TICKS:
            stride *= 2
        of_own = list(range(0, self.own, stride))
        others = len(self) - self.own
        every = max(1, -(-others // 8))
        # The first of them would touch the last suspect rank.
        first = self.own + (every if of_own else 0)
        rows = of_own + list(range(first, len(self), every))
        return {"tickvals": rows, "ticktext": [str(self.members(row)[0]) for row in rows]}

    def divider(self, theme: Theme) -> list[dict[str, Any]]:
        """The line between suspect ranks and the others."""
        if not 0 < self.own < len(self):
            return []
        return [
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": self.own - 0.5,
                "y1": self.own - 0.5,
                "line": {"color": theme.text, "width": 1.5},
                "name": "divider",
            }
        ]


def rows_of(ranks: Sequence[int], suspects: Collection[int], *, fewer: int = 1) -> Rows:
    """The rows of a chart of these ranks.

    Up to `MOST_ROWS` ranks have a row each, in their order. Of more, up to 32 suspects have rows of
    their own at the top (more suspects share these), and all others share 64 rows.

    Args:
        ranks: [R], ascending.
        suspects: ranks that must not vanish among others; those that are not in `ranks` count for
            nothing.
        fewer: times fewer rows of each sort, for a chart that is so many times less tall.
    """
    named = set(suspects)
    apart = [place for place, rank in enumerate(ranks) if rank in named]
    if len(ranks) <= MOST_ROWS // fewer:
        everyone = np.arange(len(ranks), dtype=np.int64)
        return Rows(tuple(ranks), everyone, everyone, 0)
    crowd = [place for place, rank in enumerate(ranks) if rank not in named]
    own = _starts(len(apart), _SUSPECT_ROWS // fewer)
    shared = _starts(len(crowd), _OTHER_ROWS // fewer)
    return Rows(
        tuple(ranks),
        np.array(apart + crowd, np.int64),
        np.array([*own, *(len(apart) + start for start in shared)], np.int64),
        len(own),
    )


def _starts(count: int, most: int) -> list[int]:
    """Where at most `most` rows of `count` ranks begin: a power of two of ranks on each."""
    width = 1
    while count > width * most:
        width *= 2
    return list(range(0, count, width))
