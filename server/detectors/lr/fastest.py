"""Learning rates of their own: of ranks (stages of a pipeline) and of groups of parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.detectors.mechanisms.wording import number, ranks
from rankscope.server.window import Window

# Times the rate of most ranks, from which on a rate is one of its own: by so much a rate that a
# training does not stand differs from one that it does.
_APART = 3.0
# The same of a group of parameters: new layers beside such as are trained already, or embeddings,
# have ten times the rate of the rest on purpose.
_GROUP_APART = 30.0
_GROUPS = "lr/"


@dataclass(slots=True)
class Fastest:
    """The highest rate of each rank so far, and of each group of parameters."""

    highest: dict[int, float] = field(default_factory=dict)
    of_groups: dict[str, float] = field(default_factory=dict)

    def take(self, window: Window) -> None:
        """Takes a window's rates."""
        for name in sorted(window.series):
            if name.startswith(_GROUPS):
                rates = window.series[name].values[window.series[name].present]
                known = self.of_groups.get(name, -math.inf)
                self.of_groups[name] = max(known, float(np.fmax.reduce(rates, initial=-np.inf)))
        rows = rank_rows(window, "lr")[1]
        most = np.fmax.reduce(np.where(np.isfinite(rows), rows, np.nan), axis=0, initial=-np.inf)
        for rank, rate in zip(window.ranks.tolist(), most.tolist(), strict=True):
            self.highest[rank] = max(self.highest.get(rank, -math.inf), rate)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those far above most of the others; none where all have the same."""
        if len(self.highest) < 2:
            return ()
        usual = sorted(self.highest.values())[(len(self.highest) - 1) // 2]
        return tuple(r for r, rate in sorted(self.highest.items()) if rate > _APART * usual > 0)

    @property
    def rate(self) -> float:
        """The highest of all."""
        return max(self.highest.values(), default=math.nan)

    @property
    def group(self) -> tuple[str, float] | None:
        """Number and rate of the group of parameters whose rate is far above the others'."""
        if len(self.of_groups) < 2:
            return None
        *_, (usual, _), (rate, name) = sorted((r, n) for n, r in self.of_groups.items())
        if not rate > _GROUP_APART * usual > 0:
            return None
        return name.removeprefix(_GROUPS), rate

    def sentence(self) -> str:
        """Which group of parameters it is, for a cause; empty where all have about the same."""
        if self.group is None:
            return ""
        number_, rate = self.group
        others = sorted(self.of_groups.values())[-2]
        return (
            f"The rate of parameter group {number_} of the optimizer is {number(rate / others)} "
            f"times that of the others ({number(others)} at most)."
        )

    def where(self) -> str:
        """Which ranks it is of, for a sentence; empty where all have the same."""
        return f" of {ranks(self.ranks)}" if self.ranks else ""
