"""Time and memory that a run took, beside earlier ones. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
_SHORTEST = 0.02
# Of memory: what allocators and libraries do differs by some per cent, the rest is the training's.
_LARGER, _ASSUMED_LARGER = 0.1, 0.02
# Share of the steps at which connections and caches are made.
_WARM_UP = 0.1


def step_seconds(sides: Sides) -> Measured:
    """The length of a step, without those of the warm-up.

    What else a machine does makes some steps long, or most of them: medians differ by several times
    between equal runs (30 of them on two cores with ten times as much to do: a spread of 0.96). The
    shortest steps stay what the training itself takes (0.1): a run is slower where they are longer.
    What changes within a run may be left in it as a whole, and widens the band: of 200 draws of
    equal runs, with ten processes a core beside them, 4 to 6 failed (10 to 32 without it); with
    five none, and of those with steps twice as long 140 to 180.

    Raises:
        NotMeasured: too few steps were timed, or only a part of them are slow.
    """
    sides = sides.having(STEP_SECONDS)
    begin = sides.first + math.ceil(_WARM_UP * sides.span)
    timed, too_few = [], []
    for one in sides.runs:
        course = one.courses[STEP_SECONDS]
        values = course.values[(course.steps >= begin) & np.isfinite(course.values)]
        if len(values) < FEWEST or not values.min() > 0:
            too_few.append(one.name)
        else:
            timed.append(values)
    # The run itself, or all that it would be held against.
    if sides.run.name in too_few or len(too_few) == len(sides.baseline):
        raise NotMeasured(f"fewer than {FEWEST} steps of {too_few[0]} were timed")
    sides = sides.without(set(too_few))
    ends = begin, sides.last
    shortest, median = (
        replace(_timed(sides, timed, quantile, ends), quantile=quantile)
        for quantile in (_SHORTEST, 0.5)
    )
    if shortest.state == "failed":
        return median if median.state == "failed" else shortest
    if median.state == "failed":
        times = median.value / median.expected
        raise NotMeasured(
            f"the median step is {times:.1f} times as long as the baseline's, and the shortest "
            "steps are not: the machine was busy, or only a part of the steps is slow"
        )
    return median


def _timed(
    sides: Sides, timed: Sequence[Float64], quantile: float, ends: tuple[int, int]
) -> Measured:
    """Quantiles of the lengths of steps of the run and its baseline, beside each other."""
    values = np.array([np.quantile(one, quantile) for one in timed])
    drift = np.array([_change(one, quantile) for one in timed])
    return judged(
        STEP_SECONDS,
        sides,
        values,
        band(
            np.log(values[1:]),
            assumed=math.hypot(_ASSUMED_SLOWER, float(drift[1:].mean())),
            noisier=float(drift[0]),
        ),
        tolerance=max(_SLOWER, sides.tolerance),
        steps=ends,
        scale=Scale(),
    )


def _change(lengths: Float64, quantile: float) -> float:
    """Spread of the logarithm of a quantile between eighths of a run; 0 where these are short."""
    if len(lengths) < 8 * 4:
        return 0.0
    return float(np.std([math.log(np.quantile(e, quantile)) for e in np.array_split(lengths, 8)]))


def peak(sides: Sides, metric: str) -> Measured:
    """The largest value of a metric of memory.

    Raises:
        NotMeasured: not both sides have one.
    """
    sides = sides.having(metric)
    peaks = np.array([np.nanmax(r.courses[metric].values, initial=0) for r in sides.runs])
    fine = np.isfinite(peaks) & (peaks > 0)
    if not fine[0] or not fine[1:].any():
        raise NotMeasured("not every run has a number")
    sides = sides.without({r.name for r, ok in zip(sides.runs, fine, strict=True) if not ok})
    peaks = peaks[fine]
    scale = Scale()
    return judged(
        metric,
        sides,
        peaks,
        band(scale.to(peaks[1:]), assumed=_ASSUMED_LARGER),
        tolerance=max(_LARGER, sides.tolerance),
        steps=(sides.first, sides.last),
        scale=scale,
    )
