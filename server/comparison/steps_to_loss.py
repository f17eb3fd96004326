"""How many steps a run took to a loss, beside earlier ones. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rankscope.server.comparison.bands import ASSUMED_SPEED, band, falling
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
from rankscope.server.window import Float64

STEPS_TO_LOSS = "steps_to_loss"
# Loss falls as the power -0.1 of the steps (-0.095: Kaplan et al. 2020): 1 % of it is 10 % of them.
_STEPS_PER_LOSS = 10


def steps_to_loss(sides: Sides) -> Measured:
    """How many steps it took to the loss that each baseline had reached half-way, or before.

    Half-way, so that a run that takes twice as many still gets there; before, where four fifths of
    the way were done before. What is left of it is flat: of 30 seeds of a training with noisy
    labels the steps to nine tenths differ twice as much.

    Raises:
        NotMeasured: the loss of the baseline does not fall, or too fast to count the steps.
    """
    sides = sides.having("loss")
    courses = [_Falling.of(r.courses["loss"]) for r in sides.runs]
    half = sides.first + (sides.last - sides.first) / 2
    target = max(max(c.at(half), c.most_of_the_way) for c in courses[1:])
    reached = np.array([c.reaches(target) - sides.first + 1 for c in courses])
    fewest = min(
        int((r.courses["loss"].steps - sides.first < steps).sum())
        for r, steps in zip(sides.baseline, reached[1:], strict=True)
    )
    if fewest < FEWEST:
        raise NotMeasured(
            f"the baseline has no more than {fewest} recorded steps until its loss is "
            f"{target:.4g}: it falls too fast to count them, or not at all"
        )
    scale = Scale()
    return judged(
        STEPS_TO_LOSS,
        sides,
        reached,
        band(scale.to(reached[1:]), assumed=ASSUMED_SPEED),
        tolerance=_STEPS_PER_LOSS * sides.tolerance,
        steps=(sides.first, sides.last),
        scale=scale,
        target=target,
    )


@dataclass(frozen=True, slots=True)
class _Falling:
    """A loss without its noise: levels of blocks, descending, and the steps of their middles."""

    levels: Float64
    middles: Float64

    @classmethod
    def of(cls, course: Course) -> _Falling:
        course = finite(course)
        if not len(course.steps):
            raise NotMeasured("no loss is finite")
        levels, places = falling(course.values)
        return cls(levels, np.interp(places, np.arange(len(course.steps)), course.steps))

    @property
    def most_of_the_way(self) -> float:
        """The level at which four fifths of the way are done."""
        return float(self.levels[-1] + 0.2 * (self.levels[0] - self.levels[-1]))

    def at(self, step: float) -> float:
        """The level at a step."""
        return float(np.interp(step, self.middles, self.levels))

    def reaches(self, target: float) -> float:
        """The step at which a level is reached; infinity: none."""
        if target < self.levels[-1]:
            return math.inf
        return float(np.interp(-target, -self.levels, self.middles))
