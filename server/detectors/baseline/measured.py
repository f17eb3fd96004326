"""A loss of the run beside those of its baselines at a step: what the gate makes of them there."""

from __future__ import annotations

import math

import numpy as np

from rankscope.server.comparison.courses import Course
from rankscope.server.comparison.levels import at_the_end, evaluated
from rankscope.server.comparison.measures import Measured, NotMeasured, Recorded, Sides
from rankscope.server.detectors.baseline.curves import Curve, Interim, courses
from rankscope.server.window import Baselines

LOSS, EVALUATION = "loss", "eval/loss"


def measured(
    metric: str,
    interim: Interim,
    curve: Curve,
    baselines: Baselines,
    *,
    tolerance: float,
    confidence: float,
    spared: bool = False,
) -> Measured | None:
    """A loss up to a step; None where there is too little of either side, or it is no number.

    Args:
        metric: `loss` or `eval/loss`.
        curve: of the run.
        tolerance: by what share it may be worse.
        confidence: of the band.
        spared: without the highest of the values that the mean of the loss is of: one spike makes
            no difference.
    """
    own = curve.course(interim)
    theirs = courses(baselines, metric, interim)
    begun = [course for course in theirs if len(course.steps)]
    if not len(own.steps) or not begun:
        return None
    first = max(int(course.steps[0]) for course in (own, *begun))
    own = _from(own, first)
    others = tuple(
        Recorded(name, {metric: _from(course, first)})
        for name, course in zip(baselines.runs, theirs, strict=True)
        if len(course.steps) and course.steps[-1] >= first
    )

    def found(own: Course) -> Measured:
        sides = Sides(
            Recorded(baselines.of, {metric: own}),
            others,
            first,
            interim.step,
            tolerance,
            confidence,
        )
        return at_the_end(sides, metric) if metric == LOSS else evaluated(sides, metric)

    try:
        made = found(own)
        if spared and metric == LOSS and made.steps is not None:
            late = np.flatnonzero(own.steps >= made.steps[0])
            highest = late[np.argmax(own.values[late])]
            made = found(Course(np.delete(own.steps, highest), np.delete(own.values, highest)))
    except NotMeasured:
        return None
    return made if math.isfinite(made.value) else None


def _from(course: Course, first: int) -> Course:
    kept = course.steps >= first
    return Course(course.steps[kept], course.values[kept])
