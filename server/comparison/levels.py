"""What a loss or an accuracy has come to, of a run and of earlier ones, at equal steps. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rankscope.server.comparison.bands import ASSUMED_SPEED, Band, band, mean_error
from rankscope.server.comparison.courses import Course
from rankscope.server.comparison.measures import (
    FEWEST,
    Measured,
    NotMeasured,
    Scale,
    Sides,
    finite,
    judged,
)
from rankscope.server.window import Float64, Int64

# What was reached is the mean over the last tenth of the steps. Where the noise of the batches is
# so large there that it would hide the tolerance, it is a longer end.
_ENDS = (0.1, 0.2, 0.4)
# What seeds are assumed to do to the level of a loss, as a part of the tolerance.
_SEEDS = 0.25
# Degrees of freedom of what is assumed: of five sorts of small trainings seeds differed by 0.3 to 4
# times as much, most where some of them never find what others do.
_DEGREES = 2


def at_the_end(sides: Sides, metric: str) -> Measured:
    """The mean of a metric over the last common steps.

    Raises:
        NotMeasured: there is none.
    """
    sides = sides.having(metric)
    odd = {r.name: _not_finite(r.courses[metric], sides) for r in sides.runs}
    if why := odd.pop(sides.run.name):
        return Measured(metric, "failed", why)
    sides = sides.without({name for name, why in odd.items() if why})
    ends = [end for share in _ENDS if (end := _End.of(sides, metric, share)) is not None]
    if not ends:
        raise NotMeasured(
            f"fewer than {FEWEST} values are recorded of the last {100 * _ENDS[-1]:.0f} % of the "
            "common steps"
        )
    # By the band of the baseline alone: at which of them the run fails is not looked for.
    fine = (end for end in ends if end.band.reach <= end.scale.share(sides.tolerance))
    end = next(fine, None) or min(ends, key=lambda end: end.band.reach)
    return judged(
        metric,
        sides,
        end.values,
        end.band,
        tolerance=sides.tolerance,
        steps=(end.begin, sides.last),
        scale=end.scale,
    )


def evaluated(sides: Sides, metric: str) -> Measured:
    """The mean of a metric over the last evaluations that all have made at the same steps.

    Raises:
        NotMeasured: there is none in the second half of the common steps.
    """
    sides = sides.having(metric)
    half = sides.last - sides.span / 2
    steps: Int64 = sides.runs[0].courses[metric].steps
    others = set()
    for one in sides.baseline:
        common: Int64 = np.intersect1d(steps, one.courses[metric].steps)
        # One that evaluates at other steps is no reason to compare none.
        if len(common) and common[-1] > half:
            steps = common
        else:
            others.add(one.name)
    if len(others) == len(sides.baseline):
        raise NotMeasured("there is no step in the second half at which all have evaluated")
    sides = sides.without(others)
    courses = [r.courses[metric] for r in sides.runs]
    steps = steps[steps > min(sides.last - _ENDS[0] * sides.span, steps[-1] - 1)]
    means = np.array([c.values[np.isin(c.steps, steps)].mean() for c in courses])
    fine = np.isfinite(means)
    if not fine[0]:
        return Measured(metric, "failed", f"it is not finite at step {int(steps[-1]):,}")
    odd = [r.name for r, ok in zip(sides.runs, fine, strict=True) if not ok]
    sides = sides.without(set(odd))
    means = means[fine]
    scale = Scale(None if (means > 0).all() else _progress(sides, metric), _sign(metric))
    # The place of the last evaluations stands in for the middle of an end.
    share = 2 * (sides.last - float(steps.mean())) / sides.span
    slopes = [
        _slope(finite(r.courses[metric]), mean, share, sides)
        for r, mean in zip(sides.baseline, means[1:], strict=True)
    ]
    return judged(
        metric,
        sides,
        means,
        band(
            scale.to(means[1:]),
            assumed=_assumed(sides, scale, np.array(slopes), means[1:]),
            degrees=_DEGREES,
            confidence=sides.confidence,
        ),
        tolerance=sides.tolerance,
        steps=(int(steps[0]), int(steps[-1])),
        scale=scale,
    )


def _assumed(sides: Sides, scale: Scale, slopes: Float64, levels: Float64) -> float:
    """The spread between seeds that is assumed: of what they reach, and of how fast they do.

    A tolerance that makes sense is some times what seeds do.
    """
    slope = float(np.median(scale.distances(slopes, levels)))
    return math.hypot(_SEEDS * sides.tolerance, ASSUMED_SPEED * slope)


def _sign(metric: str) -> float:
    return -1.0 if metric.endswith("accuracy") else 1.0


def _not_finite(course: Course, sides: Sides) -> str:
    """Where a metric is not finite in the last steps; empty: nowhere."""
    values = course.values[course.steps > sides.last - _ENDS[0] * sides.span]
    odd = int((~np.isfinite(values)).sum())
    return f"it is not finite at {odd:,} of the last {len(values):,} recorded steps" if odd else ""


@dataclass(frozen=True, slots=True)
class _End:
    """The last steps, from `begin` on: values of the run and its baseline, and the band of this."""

    begin: int
    scale: Scale
    values: Float64
    band: Band

    @classmethod
    def of(cls, sides: Sides, metric: str, share: float) -> _End | None:
        """That of a share of the common steps; None where too few values are there."""
        begin = math.floor(sides.last - share * sides.span) + 1
        means, errors, slopes = [], [], []
        for one in sides.runs:
            course = finite(one.courses[metric])
            late = course.steps >= begin
            if late.sum() < FEWEST:
                return None
            values = course.values[late]
            mean = _at_middle(course.steps[late], values, (begin + sides.last) / 2)
            means.append(mean)
            errors.append(mean_error(values))
            slopes.append(_slope(course, mean, share, sides))
        levels = np.array(means)
        scale = Scale(None if (levels > 0).all() else _progress(sides, metric), _sign(metric))
        noise = scale.distances(np.array(errors), levels) ** 2
        of_baseline = float(noise[1:].mean())
        assumed = _assumed(sides, scale, np.array(slopes[1:]), levels[1:])
        found = band(
            scale.to(levels[1:]),
            assumed=math.hypot(assumed, math.sqrt(of_baseline)),
            noisier=math.sqrt(max(0.0, float(noise[0]) - of_baseline)),
            degrees=_DEGREES,
            confidence=sides.confidence,
        )
        return cls(begin, scale, levels, found)


def _at_middle(steps: Int64, values: Float64, middle: float) -> float:
    """The mean, as it would be if the recorded steps lay evenly around a middle."""
    x = steps - steps.mean()
    total = float(x @ x)
    mean = float(values.mean())
    slope = float(x @ values) / total if total > 0 else 0.0
    level = mean + slope * (middle - float(steps.mean()))
    # A line may cross 0 where the values do not.
    return level if values.min() <= level <= values.max() else mean


def _slope(course: Course, level: float, share: float, sides: Sides) -> float:
    """By how much a metric changes over the second half, per unit of the logarithm of steps.

    Args:
        level: its mean over the last `share` of the steps.
    """
    at = (course.steps - sides.first + 1) / sides.span
    place = 1 - share / 2
    middle = (at > 0.4) & (at <= 0.6) & (at <= 0.8 * place)
    if not middle.any():
        # Seldom recorded: the last value before.
        middle = at == at[at <= 0.8 * place].max(initial=0)
    if not middle.any():
        return 0.0
    earlier = float(np.log(at[middle]).mean())
    return (level - float(course.values[middle].mean())) / (math.log(place) - earlier)


def _progress(sides: Sides, metric: str) -> float:
    """How far the baseline has come: what shares are of where values are not all positive."""
    ways = []
    for one in sides.baseline:
        values = finite(one.courses[metric]).values
        tenth = max(1, len(values) // 10)
        ways.append(abs(float(values[:tenth].mean() - values[-tenth:].mean())))
    unit = float(np.median(ways))
    if not unit > 0:
        raise NotMeasured("it is not positive throughout, and did not change in the baseline")
    return unit
