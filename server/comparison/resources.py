"""Time and memory that a run took, beside earlier ones. Pure."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from rankscope.server.comparison.bands import band
from rankscope.server.comparison.measures import (
    FEWEST,
    Measured,
    NotMeasured,
    Scale,
    Sides,
    judged,
)
from rankscope.server.window import Float64

STEP_SECONDS = "step_seconds"
MEMORY = (
    "process_resident_memory_bytes",
    "cuda_max_memory_allocated_bytes",
    "cuda_memory_reserved_bytes",
)
# By how much longer a step has to be: what `throughput.dropped` asks for, for the same
# reason (400 healthy runs on a busy machine). And what is assumed of the spread between runs.
_SLOWER, _ASSUMED_SLOWER = 0.5, 0.1
_SHORTEST = 0.1
# Of memory: what allocators and libraries do differs by some per cent, the rest is the training's.
_LARGER, _ASSUMED_LARGER = 0.1, 0.02
# Share of the steps at which connections and caches are made.
_WARM_UP = 0.1


def step_seconds(sides: Sides) -> Measured:
    """The length of a step, without those of the warm-up.

    What else a machine does makes some steps long, or most of them: their median differs by several
    times between equal runs. The shortest tenth stays what the training itself takes (between 30
    runs of it, on two cores with ten times as much to do, a spread of 0.12 in place of 0.96). So a
    run is slower where both are.

    Raises:
        NotMeasured: too few steps were timed, or only a part of them are slow.
    """
    sides = sides.having(STEP_SECONDS)
    begin = sides.first + math.ceil(_WARM_UP * sides.span)
    lengths = []
    for one in sides.runs:
        course = one.courses[STEP_SECONDS]
        values = course.values[(course.steps >= begin) & np.isfinite(course.values)]
        if len(values) < FEWEST or not np.quantile(values, _SHORTEST) > 0:
            raise NotMeasured(f"fewer than {FEWEST} steps of {one.name} were timed")
        lengths.append(np.quantile(values, [_SHORTEST, 0.5]))
    ends = begin, sides.last
    shortest, median = (
        replace(
            _judged(sides, STEP_SECONDS, values, _SLOWER, _ASSUMED_SLOWER, ends), quantile=quantile
        )
        for values, quantile in zip(np.array(lengths).T, (_SHORTEST, 0.5), strict=True)
    )
    if shortest.state == "failed":
        return median if median.state == "failed" else shortest
    if median.state == "failed":
        times = median.value / median.expected
        raise NotMeasured(
            f"the median step is {times:.1f} times as long as the baseline's, and the shortest "
            "tenth of the steps are not: the machine was busy, or only a part of the steps is slow"
        )
    return median


def peak(sides: Sides, metric: str) -> Measured:
    """The largest value of a metric of memory.

    Raises:
        NotMeasured: not both sides have one.
    """
    sides = sides.having(metric)
    peaks = np.array([np.nanmax(r.courses[metric].values, initial=0) for r in sides.runs])
    if not (np.isfinite(peaks) & (peaks > 0)).all():
        raise NotMeasured("not every run has a number")
    ends = sides.first, sides.last
    return _judged(sides, metric, peaks, _LARGER, _ASSUMED_LARGER, ends)


def _judged(
    sides: Sides,
    metric: str,
    values: Float64,
    tolerance: float,
    assumed: float,
    ends: tuple[int, int],
) -> Measured:
    scale = Scale()
    return judged(
        metric,
        sides,
        values,
        band(scale.to(values[1:]), assumed=assumed),
        tolerance=max(tolerance, sides.tolerance),
        steps=ends,
        scale=scale,
    )
