"""The run's own curves, in the buckets of those of its baselines, and when they are compared.

An interim comparison is of what lies before a step. They are a ninth of the steps so far apart, so
that the last tenth of the steps before one begins where the one before was: a run of any length is
compared some dozens of times, and what is said does not depend on how the steps came.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.comparison.courses import Course
from rankscope.server.window import Baselines, Check, Float64, Int64
from rankscope.server.window.baselines import BUCKETS, width_at

# Buckets before the first: of the last two fifths of them the gate's comparison takes a mean, and
# needs eight.
_FIRST = 32
# Share of the steps so far that lies between two of them.
_APART = 0.1


@dataclass(frozen=True, slots=True)
class Interim:
    """Where a run is compared.

    Attributes:
        step: up to which.
        width: steps of the buckets that are compared.
        final: the baselines go no further.
    """

    step: int
    width: int
    final: bool


@dataclass(slots=True)
class Interims:
    """The interim comparisons of a run, one after the other.

    Attributes:
        buckets: before the next one; of `width` steps.
        over: the baselines go no further.
    """

    buckets: int = _FIRST
    width: int = 1
    over: bool = False

    def until(self, step: int, last: int, *, least_width: int = 1) -> Iterator[Interim]:
        """Those that are due at a step.

        Args:
            last: step up to which there are baselines.
            least_width: of the narrowest buckets that they are kept in.
        """
        if self.width < least_width:
            self.buckets, self.width = _FIRST // 2, least_width
        width = max(width_at(last), least_width)
        end = (last + 1) // width * width - 1
        while not self.over:
            at = min(self.buckets * self.width - 1, end)
            if at > step or at < 0:
                return
            self.over = at == end
            yield Interim(at, width if self.over else self.width, self.over)
            self._go_on()

    def _go_on(self) -> None:
        self.buckets += max(1, round(_APART / (1 - _APART) * self.buckets))
        if self.buckets > BUCKETS:
            # The same place in the next wider ones.
            self.buckets, self.width = -(-self.buckets // 4), 4 * self.width


@dataclass(slots=True)
class Curve:
    """A series of the run: the mean, the lowest or the highest value of each bucket.

    Args:
        which: `mean`, `low` or `high`.
    """

    which: str = "mean"
    first: int = -1
    _values: dict[int, Float64] = field(default_factory=dict)
    _counts: dict[int, Int64] = field(default_factory=dict)

    def push(self, steps: Int64, values: Float64, widths: Collection[int]) -> None:
        """Takes values at steps, float64 [N], into the buckets of each width."""
        fine = np.isfinite(values)
        if not fine.all():
            steps, values = steps[fine], values[fine]
        if not len(steps):
            return
        if self.first < 0:
            self.first = int(steps[0])
        for width in widths:
            if width not in self._values:
                empty = {"mean": 0.0, "low": np.inf, "high": -np.inf}[self.which]
                self._values[width] = np.full(BUCKETS, empty)
                self._counts[width] = np.zeros(BUCKETS, np.int64)
            places = steps // width
            end = int(np.searchsorted(places, BUCKETS))
            if not end:
                continue
            # One after the other: sums do not depend on how the steps were cut into windows.
            add = {"mean": np.add, "low": np.fmin, "high": np.fmax}[self.which]
            add.at(self._values[width], places[:end], values[:end])
            np.add.at(self._counts[width], places[:end], 1)

    def course(self, interim: Interim) -> Course:
        """Up to an interim comparison, the step and the value of each bucket that holds any."""
        if interim.width not in self._values:
            return Course(np.empty(0, np.int64), np.empty(0))
        end = (interim.step + 1) // interim.width
        counts = self._counts[interim.width][:end]
        places = np.flatnonzero(counts)
        values = self._values[interim.width][places]
        if self.which == "mean":
            values = values / counts[places]
        return Course(places * interim.width, values)


def courses(baselines: Baselines, name: str, interim: Interim) -> list[Course]:
    """The same of each baseline."""
    curves = baselines.curves.get(name, {}).get(interim.width)
    if curves is None:
        return []
    end = (interim.step + 1) // interim.width
    found = []
    for curve in curves[:, :end]:
        places = np.flatnonzero(np.isfinite(curve))
        found.append(Course(places * interim.width, curve[places].astype(np.float64)))
    return found


def usable(baselines: Baselines | None, least: int) -> Baselines | Check:
    """What a run can be held against; or what is answered where there is nothing, or too little."""
    if baselines is None or not baselines.runs:
        why = baselines.why if baselines is not None else ""
        return Check.missing(why or "The project has no baselines.")
    if len(baselines.runs) < least:
        return Check.missing(
            f"{len(baselines.runs)} of {least} baselines needed: of fewer nothing says how far "
            "apart runs of other seeds lie."
        )
    return baselines
