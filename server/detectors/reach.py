"""How short a trouble can be and still be seen, where not every step is recorded.

Evidence is counted in observations. A detector that finds what lasts six of them finds it within
six steps where every step is recorded, and where one of twenty is, only what lasts 120: all that
is shorter passes between two observations, or is over before there are enough. Nothing was found
then, and it was not looked for, which must not read as if all were well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Check, Reach, Status
from rankscope.server.detectors.statistics import Spacing
from rankscope.server.detectors.wording import count, number
from rankscope.server.window import Window

# Steps from one observation to the next from which on steps are taken to be left out: a few that
# are missing (a post that was lost, a phase without losses) are not.
_SPARSE = 1.5


@dataclass(slots=True)
class Recorded:
    """At how many of a run's steps series are recorded.

    Args:
        names: those that are counted.
    """

    names: frozenset[str]
    _spacings: dict[str, Spacing] = field(default_factory=dict)

    def take(self, window: Window) -> None:
        """Counts the steps of the next window at which any rank has posted a finite value."""
        for name in self.names:
            series = window.series.get(name)
            if series is None:
                continue
            usable = series.present & np.isfinite(series.values)
            steps = window.steps[usable.any(axis=0)]
            if len(steps):
                spacing = self._spacings.setdefault(name, Spacing())
                spacing.push_all(int(steps[0]), int(steps[-1]), len(steps))

    def told(self, check: Check, reaches: Iterable[Reach]) -> Check:
        """What a detector answers, with what it cannot have seen.

        Args:
            check: its own answer; all but that all is well stay as they are.
            reaches: what it has to see of what it looks for.
        """
        if check.status is not Status.OK:
            return check
        unseen = [(blind, why) for reach in reaches for blind, why in self._unseen(reach)]
        if not unseen:
            return check
        blind, why = max(unseen)
        return Check(
            Status.INSUFFICIENT_DATA if blind else Status.OK,
            f"{check.why} But {why}",
        )

    def _unseen(self, reach: Reach) -> Iterator[tuple[bool, str]]:
        """What a sparse series hides: whether that is too much, and a sentence for a person."""
        known = [
            (self._spacings[name].count, name) for name in reach.series if name in self._spacings
        ]
        if not known:
            return
        total, name = max(known)
        apart = self._spacings[name].apart
        if apart < _SPARSE:
            return
        shortest = math.ceil(reach.observations * apart)
        yield (
            reach.observations > reach.lasts * total,
            f"`{name}` is recorded at one of {number(round(apart))} steps: what lasts less than "
            f"{count(shortest, 'step')} may pass unseen, and where each is recorded, less than "
            f"{number(reach.observations)}.",
        )
