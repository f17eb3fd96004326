"""One measure of a run beside the same of earlier runs: of what it is taken, what it comes to.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from rankscope.server.comparison.bands import CONFIDENCE, Band
from rankscope.server.comparison.courses import Course
from rankscope.server.window import Float64

# Recorded values without which a run is not measured.
FEWEST = 8


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a run has recorded.

    Attributes:
        name: of the run.
        courses: by metric: means over the ranks, of memory the largest of them.
        elsewhere: on another kind of machine: times and memory say which steps there are, and no
            more.
    """

    name: str
    courses: Mapping[str, Course] = field(default_factory=dict)
    elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """One measure of a run beside that of its baseline, in the measure's unit.

    Attributes:
        name: of the measure.
        state: `passed`, `failed` or `not_run`.
        why: why it was not measured, or is no number; else empty.
        value: the run's; infinity: not reached. NaN, as all numbers, where not measured.
        expected: the baseline's mean.
        bound: the worst that passes: the prediction limit, or what the tolerance allows if that
            is worse.
        steps: first and last step of what was compared.
        target: the loss that was to be reached; else NaN.
        quantile: of the lengths of steps, the one that is compared; else NaN.
        runs: the baselines that it was compared with.
        values: of each of them.
    """

    name: str
    state: str
    why: str = ""
    value: float = math.nan
    expected: float = math.nan
    bound: float = math.nan
    steps: tuple[int, int] | None = None
    target: float = math.nan
    quantile: float = math.nan
    runs: tuple[str, ...] = ()
    values: tuple[float, ...] = ()


class NotMeasured(Exception):
    """Why there is no such measure."""


@dataclass(frozen=True, slots=True)
class Sides:
    """A run and its baseline, cut to the steps `first` to `last`, which all of them have.

    Attributes:
        tolerance: share by which a value may be worse.
        confidence: of the band: share of runs of the same training that pass.
    """

    run: Recorded
    baseline: tuple[Recorded, ...]
    first: int
    last: int
    tolerance: float
    confidence: float = CONFIDENCE

    @property
    def span(self) -> int:
        """Number of common steps."""
        return self.last - self.first + 1

    @property
    def runs(self) -> tuple[Recorded, ...]:
        """The run, then its baseline."""
        return self.run, *self.baseline

    def having(self, metric: str) -> Sides:
        """Those that have recorded a metric.

        Raises:
            NotMeasured: not both sides have.
        """
        kept = tuple(r for r in self.baseline if metric in r.courses)
        if not kept:
            raise NotMeasured("the baseline has not recorded it up to there")
        if metric not in self.run.courses:
            raise NotMeasured("the run has not recorded it, its baseline has")
        return replace(self, baseline=kept)

    def without(self, names: set[str]) -> Sides:
        """The same without some baselines.

        Raises:
            NotMeasured: none is left, for want of numbers that are finite.
        """
        kept = tuple(r for r in self.baseline if r.name not in names)
        if not kept:
            raise NotMeasured("it is not finite at the end of the baseline")
        return replace(self, baseline=kept)


@dataclass(frozen=True, slots=True)
class Scale:
    """On which distances are shares and larger is worse.

    Attributes:
        unit: what shares are shares of; None: of the values themselves, by their logarithms.
        sign: -1 where less is worse.
    """

    unit: float | None = None
    sign: float = 1.0

    def to(self, values: Float64) -> Float64:
        """Levels of values, float64 [N]; infinity stays."""
        scaled = np.log(values) if self.unit is None else values / self.unit
        return np.asarray(self.sign * scaled)

    def back(self, level: float) -> float:
        """The value of a level."""
        plain = self.sign * level
        # Beyond, an assumed spread has no number; no training has either.
        return math.exp(min(plain, 700.0)) if self.unit is None else plain * self.unit

    def distances(self, differences: Float64, values: Float64) -> Float64:
        """Small differences of values as distances of levels, without a sign."""
        return np.abs(differences) / (values if self.unit is None else self.unit)

    def share(self, share: float) -> float:
        """Distance of a level that is worse by a share."""
        return self.sign * math.log1p(self.sign * share) if self.unit is None else share


def finite(course: Course) -> Course:
    """The steps at which a course is finite."""
    fine = np.isfinite(course.values)
    return course if fine.all() else Course(course.steps[fine], course.values[fine])


def judged(
    name: str,
    sides: Sides,
    values: Float64,
    band: Band,
    *,
    tolerance: float,
    steps: tuple[int, int],
    scale: Scale,
    target: float = math.nan,
) -> Measured:
    """A measure beside a band: it fails beyond both the band and the tolerance.

    Args:
        values: of the run, then of its baseline, float64 [1 + N].
        tolerance: share by which a value may be worse than expected.
    """
    level = float(scale.to(values[:1])[0])
    bound = max(band.limit, band.expected + scale.share(tolerance))
    return Measured(
        name,
        "failed" if level > bound else "passed",
        value=float(values[0]),
        expected=scale.back(band.expected),
        bound=scale.back(bound),
        steps=steps,
        target=target,
        runs=tuple(r.name for r in sides.baseline),
        values=tuple(values[1:].tolist()),
    )
