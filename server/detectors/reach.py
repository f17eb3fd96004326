"""Whether a detector that found nothing has seen enough to have found it: the power of a pass.

Evidence is counted in observations. A detector that finds what lasts six of them finds it within
six steps where every step is recorded, and where one of twenty is, only what lasts 120: all that is
shorter passes between two observations, or is over before there are enough. Of the versions of an
asynchronous parameter server those count that somebody had pulled: no other has a loss. What comes
again after some unknown number of steps (an epoch in one order) is seen only where both of the
steps were recorded. And of a series that has only ever had one value, nothing shows that it could
have another one. Nothing was found then, and it was not looked for, which must not read as if all
were well: the runner makes INSUFFICIENT_DATA of such an answer, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import numpy as np

from rankscope.server.detectors.base import Reach
from rankscope.server.detectors.mechanisms.statistics import Spacing
from rankscope.server.detectors.mechanisms.wording import count, number
from rankscope.server.detectors.push.pulled import Pulled
from rankscope.server.window import Bool, Check, Float64, Int64, Status, Window

# Steps from one observation to the next from which on steps are taken to be left out: a few that
# are missing (a post that was lost, a phase without losses) are not.
_SPARSE = 1.5
# Steps from one observation to the next up to which a stretch goes on: every other one is enough
# to see an order, and single posts are lost now and then.
_ADJACENT = 2

DIGESTS, LAYERS, REDUCTIONS = "words/", "layers/", "reductions"


@dataclass(slots=True)
class _Seen:
    """What is known of the steps at which a series is recorded.

    Attributes:
        stretch, longest: observations in the newest stretch of adjacent steps, and in the longest.
        span: steps that the longest one takes.
        values: smallest and largest value; of digests and tables none.
    """

    spacing: Spacing = field(default_factory=Spacing)
    stretch: int = 0
    begin: int = 0
    longest: int = 0
    span: int = 0
    least: float = math.inf
    most: float = -math.inf

    def take(self, steps: Int64, values: Float64 | None) -> None:
        """Takes the next observations, at least one: their steps, ascending, and their values."""
        if values is not None:
            # 0 and -0 are one number.
            self.least = min(self.least, float(values.min()))
            self.most = max(self.most, float(values.max()))
        last = self.spacing.last if self.spacing.count else int(steps[0]) - _ADJACENT - 1
        breaks = np.flatnonzero(np.diff(steps, prepend=last) > _ADJACENT)
        edges = [0, *breaks.tolist(), len(steps)]
        for low, high in zip(edges, edges[1:], strict=False):
            if low in breaks:
                self.stretch, self.begin = 0, int(steps[low])
            if high > low:
                self.stretch += high - low
                if self.stretch > self.longest:
                    self.longest = self.stretch
                    self.span = int(steps[high - 1]) - self.begin + 1
        self.spacing.push_all(int(steps[0]), int(steps[-1]), len(steps))


@dataclass(slots=True)
class Recorded:
    """At how many of a run's steps series are recorded.

    Args:
        names: those that are counted: of scalars as they are or as patterns (`eval/*loss`),
            `words/batch` of digests, `layers/grad_norm` of numbers of single tensors, `reductions`.
    """

    names: frozenset[str]
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _counted: dict[str, bool] = field(default_factory=dict)
    _pulled: Pulled = field(default_factory=Pulled)
    _last_step: int = -1

    def take(self, window: Window) -> None:
        """Counts the steps of the next window at which any rank has posted a finite value."""
        self._last_step = max(self._last_step, window.last_step)
        self._pulled.begin(window)
        for name in self.names:
            if name == REDUCTIONS:
                self._push(name, _unique([made.step for made in window.reductions]))
            elif name.startswith(LAYERS):
                metric = name.removeprefix(LAYERS)
                found = [made.step for made in window.layers if made.metric == metric]
                self._push(name, _unique(found))
            elif name.startswith(DIGESTS):
                digests = window.digests.get(name.removeprefix(DIGESTS))
                if digests is not None:
                    self._push(name, window.steps[digests.present.any(axis=0)])
        for name, series in window.series.items():
            if name not in self._counted:
                self._counted[name] = any(fnmatchcase(name, like) for like in self.names)
            if not self._counted[name]:
                continue
            usable: Bool = series.present & np.isfinite(series.values)
            values = np.broadcast_to(series.values, usable.shape)[usable]
            self._push(name, window.steps[usable.any(axis=0)], values)
        self._pulled.end(window)

    def _push(self, name: str, steps: Int64, values: Float64 | None = None) -> None:
        if len(steps):
            self._pulled.take(name, steps)
            self._seen.setdefault(name, _Seen()).take(steps, values)

    def qualified(self, kind: str, check: Check, reaches: Iterable[Reach]) -> Check:
        """What a detector answers, with what it cannot have seen.

        Args:
            kind: what the answer is for.
            check: its own answer; all but that all is well stay as they are.
            reaches: what it has to see of what it looks for.
        """
        if check.status is not Status.OK:
            return check
        unseen = [
            (blind, why)
            for reach in reaches
            if not reach.kinds or kind in reach.kinds
            for blind, why in self._unseen(reach)
        ]
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
            (seen.spacing.count, name)
            for name, seen in self._seen.items()
            if any(fnmatchcase(name, pattern) for pattern in reach.series)
        ]
        if not known:
            return
        total, name = max(known)
        seen = self._seen[name]
        quoted = f"`{name.removeprefix(DIGESTS).removeprefix(LAYERS)}`"
        if reach.moves and total > 1 and seen.least == seen.most:
            # Norms that are clipped have one value, and it is none to worry about.
            if reach.moves == "at all" or seen.most == 0:
                value = number(seen.most + 0.0)
                yield (
                    True,
                    f"{quoted} was exactly {value} at all {count(total, 'recorded step')}: nothing "
                    "shows that it can change.",
                )
        if total < reach.observations:
            yield (
                True,
                f"{quoted} is recorded at {count(total, 'step')}, and {reach.observations} are "
                "needed to see it.",
            )
            return
        if reach.returns:
            yield from self._returning(reach, quoted, seen)
            return
        interval = min(seen.spacing.interval, self._pulled.interval(name))
        if interval < _SPARSE or reach.lasts >= 1:
            return
        shortest = math.ceil(reach.observations * interval)
        yield (
            reach.observations > reach.lasts * total,
            f"{quoted} is recorded at one of {number(round(interval))} steps: a fault that lasts "
            f"less than {count(shortest, 'step')} may go unseen; where every step is recorded, "
            f"one of less than {number(reach.observations)}.",
        )

    def _returning(self, reach: Reach, quoted: str, seen: _Seen) -> Iterator[tuple[bool, str]]:
        """Whether something could have come again after a number of steps that was not recorded.

        After at most as many steps as the longest stretch has: within it. After P steps, which are
        more: what comes P steps after the stretch takes as many steps as the stretch, of which
        enough have to be recorded. That it came twice takes twice as many steps as P.
        """
        steps = self._last_step - seen.spacing.first + 1
        if steps <= 2 * seen.span:
            return
        outside = seen.spacing.count - seen.longest
        interval = (steps - seen.span) / outside if outside else math.inf
        if interval * reach.observations <= seen.span:
            return
        recorded = number(round(steps / seen.spacing.count))
        yield (
            True,
            f"{quoted} is recorded at one of {recorded} steps, and at most at {seen.span:,} in a "
            "row: what recurs after more steps than these may go unseen.",
        )


def _unique(steps: list[int]) -> Int64:
    return np.unique(np.array(steps, dtype=np.int64))
