"""Settings that differ between ranks whose parameters differ by design.

Between two averagings (local SGD), after the last reduction (post-local SGD) and on workers of a
parameter server all links but this one may be broken: what the ranks hold, and their gradients.
With which settings they step is still to be the same, and does not follow from the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.window import Comparison, Window

STAGE = "hyperparameters"
# Settings as numbers, `hyperparameters/<group>/<setting>`, posted when they change.
SERIES = f"{STAGE}/*"


@dataclass(slots=True)
class Given:
    """What each rank's optimizer was last known to be set to.

    Attributes:
        values: series -> rank -> value.
    """

    values: dict[str, dict[int, float]] = field(default_factory=dict)

    def take(self, window: Window) -> None:
        """Learns what a window's series say, up to its end."""
        for name, found in self._changed(window, window.last_step).items():
            self.values.setdefault(name, {}).update(found)

    def differing(self, window: Window, comparison: Comparison) -> tuple[str, Mapping[int, float]]:
        """A setting that is known of all compared ranks and is not the same; ("", {}) for none."""
        changed = self._changed(window, comparison.step)
        members = comparison.ranks.tolist()
        for name in sorted({*self.values, *changed}):
            setting = name.split("/", 2)[2]
            # Of further groups, only what differs from the first one is posted at the start.
            known = [
                self.values.get(f"{STAGE}/0/{setting}", {}),
                changed.get(f"{STAGE}/0/{setting}"),
            ]
            known += [self.values.get(name), changed.get(name)]
            held: dict[int, float] = {}
            for one in known:
                held |= one or {}
            if all(rank in held for rank in members) and len({held[r] for r in members}) > 1:
                return _called(setting), {rank: held[rank] for rank in members}
        return "", {}

    @staticmethod
    def _changed(window: Window, step: int) -> dict[str, dict[int, float]]:
        """Series -> rank -> last value in the window up to a step."""
        end = int(np.searchsorted(window.steps, step, side="right"))
        found: dict[str, dict[int, float]] = {}
        for name, series in window.series.items():
            if name.startswith(f"{STAGE}/") and name.count("/") > 1:
                for row, column in zip(*np.nonzero(series.present[:, :end]), strict=True):
                    of_name = found.setdefault(name, {})
                    of_name[int(window.ranks[row])] = float(series.values[row, column])
        return found


def _called(setting: str) -> str:
    """`beta1` for the first of `betas`, as papers have it; `weight decay` for `weight_decay`."""
    name, _, index = setting.rpartition(".")
    if name and index.isdigit():
        setting = f"{name.removesuffix('s')}{int(index) + 1}"
    return setting.replace("_", " ")
