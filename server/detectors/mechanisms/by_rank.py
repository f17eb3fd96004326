"""Numbers that are kept of each rank, in arrays that grow as ranks come. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rankscope.server.window import Bool, Int64

# Steps after its last sample for which a rank counts as there: agents sample one in 4,096 at least,
# and each at steps of its own.
_LEFT = 8192


@dataclass(slots=True)
class ByRank:
    """Columns of numbers, a row for each rank that has been met.

    Args:
        empty: name of a column -> what it holds of a rank that has just come; its type is theirs.

    Attributes:
        ranks: ascending, int64 [R].
        sampled: newest step at which each was, int64 [R].
    """

    empty: Mapping[str, float]
    ranks: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    sampled: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    _columns: dict[str, np.ndarray[Any, np.dtype[Any]]] = field(default_factory=dict)

    def __getitem__(self, column: str) -> np.ndarray[Any, np.dtype[Any]]:
        """A column, [R], to be read and written."""
        return self._columns[column]

    def rows(self, ranks: Int64) -> Int64:
        """The rows of some ranks, with room for those that are new."""
        every = np.union1d(self.ranks, ranks)
        if len(every) > len(self.ranks) or not self._columns:
            places = np.searchsorted(every, self.ranks)
            for name, value in self.empty.items():
                made = np.full(len(every), value)
                made[places] = self._columns.get(name, made[:0])
                self._columns[name] = made
            newest = np.full(len(every), -_LEFT - 1)
            newest[places] = self.sampled
            self.ranks, self.sampled = every, newest
        return np.searchsorted(self.ranks, ranks)

    def there(self, step: int) -> Bool:
        """Ranks that have been sampled not long before a step: who has not has left."""
        found: Bool = step - self.sampled <= _LEFT
        return found
