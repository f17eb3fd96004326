"""At which versions of an asynchronous parameter server's model there was something to record."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rankscope.server.detectors.push.applied import SERIES, pushes
from rankscope.server.window import Int64, Window

# Versions for which what was recorded is remembered: a gradient that is older when it is applied
# is `push.stale`, whatever else is known of it.
_REMEMBERED = 4096


@dataclass(slots=True)
class Pulled:
    """How many of the versions on which gradients were computed each series is recorded at.

    Workers make no common steps: of the versions of the model, those have a loss that somebody had
    pulled. Where several workers pull at one time, or wait for each other, most others have none,
    and nothing is left out.

    Attributes:
        versions: number of different ones on which gradients were computed, of those that the
            server reports.
    """

    versions: int = 0
    _there: bool = False
    _recorded: dict[str, int] = field(default_factory=dict)
    _steps: dict[str, set[int]] = field(default_factory=dict)
    _known: set[int] = field(default_factory=set)

    def begin(self, window: Window) -> None:
        """Before the series of a window: whether the run has a parameter server."""
        series = window.series.get(SERIES[0])
        self._there = self._there or (series is not None and bool(series.present.any()))

    def take(self, name: str, steps: Int64) -> None:
        """The steps of the window at which a series is recorded."""
        if self._there:
            self._steps.setdefault(name, set()).update(steps.tolist())

    def end(self, window: Window) -> None:
        """After all series of a window: a gradient comes after what it was computed on."""
        if not self._there:
            return
        for push in pushes(window):
            if push.computed_on in self._known:
                continue
            self._known.add(push.computed_on)
            self.versions += 1
            for name, steps in self._steps.items():
                self._recorded[name] = self._recorded.get(name, 0) + (push.computed_on in steps)
        oldest = window.last_step - _REMEMBERED
        for steps in (self._known, *self._steps.values()):
            steps.difference_update([step for step in steps if step < oldest])

    def interval(self, name: str) -> float:
        """Of how many such versions one is recorded; infinite where that is not known."""
        recorded = self._recorded.get(name, 0)
        return self.versions / recorded if recorded else math.inf
