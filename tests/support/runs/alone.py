"""A run as its first rank alone would have reported it: one process, nothing to compare with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from rankscope.server.window import Series, Window
from tests.support.runs.scenarios import Scenario


@dataclass(frozen=True)
class Alone:
    """Attributes: whole: the run of several ranks."""

    whole: Scenario

    def windows(self, cuts: Iterable[int] = ()) -> Iterator[Window]:
        """Those of a run of one process, with the first rank's data."""
        for window in self.whole.windows(cuts):
            yield replace(
                window,
                world_size=1,
                ranks=window.ranks[:1],
                series=_first(window.series),
                digests=_first(window.digests),
                comparisons=(),
                reductions=(),
                element_sums=(),
                gradient_products=(),
                classes=(),
                rank_local=frozenset(),
                liveness=window.liveness[:1],
                configs={r: c for r, c in window.configs.items() if r == 0},
                begins={r: b for r, b in window.begins.items() if r == 0},
                layers=tuple(made for made in window.layers if made.rank == 0),
                events=tuple(e for e in window.events if e.rank == 0),
            )


def _first(series):
    return {
        name: Series(one.values[:1], one.present[:1])
        for name, one in series.items()
        if one.present[:1].any() or not one.present.any()
    }
