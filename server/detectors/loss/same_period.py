"""What else has the period of a loss that swings: the data's, or the schedule's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.mechanisms.leaps import BEYOND
from rankscope.server.detectors.mechanisms.recurrence import CYCLES
from rankscope.server.detectors.mechanisms.wording import number

# Of the inputs of one place: sources that take turns are normalised alike, to within this factor.
_LARGER = 3.0
# Of the learning rate of one place, as a rise of it is found everywhere (`RisePolicy`).
_FASTER = 1.5
COSINE = "grad_cosine"
# By how much the step before can have changed the loss, at most (`Leaps.reach`).
REACH = "reach"
# Cosine of consecutive gradients below which each takes back a part of what the last has done: of
# two tasks it scatters around 0 by a tenth or two, of steps that are too large it is near -1.
_SENT_BACK = -0.3
# Share of the deviance explained at other places: more than a small part of what there is to learn.
_GOOD = 0.25


@dataclass(slots=True)
class Beside:
    """What else has the loss's period: of each series the lowest and highest place within it.

    Attributes:
        cosine: median of those of the gradients of consecutive steps; NaN where they are not known.
        reach: median of what a step can have changed the loss by; NaN where it is not known.
    """

    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    cosine: float = math.nan
    reach: float = math.nan

    def times(self, metric: str) -> float:
        """The highest place over the lowest; 1 where nothing is known."""
        low, high = self.ranges.get(metric, (1.0, 1.0))
        return high / low if low > 0 else 1.0

    @property
    def worse(self) -> bool:
        """Answers that are good at other places are at one no better than a constant."""
        low, high = self.ranges.get("explained_deviance", (0.0, 0.0))
        return low <= 0 and high >= _GOOD

    @property
    def harmless(self) -> bool:
        """Whether the batches of all places are answered well, and they differ in how well."""
        low, _ = self.ranges.get("explained_deviance", (0.0, 0.0))
        return low >= _GOOD and not self.odd

    @property
    def turns(self) -> bool:
        """Whether gradients of consecutive steps have little to do with each other.

        Who oversteps a valley is sent back at the next step; tasks or sources that take turns,
        each with a loss of its own size, are not.
        """
        return self.cosine > _SENT_BACK and not self.odd

    @property
    def odd(self) -> bool:
        """Whether a fault of the data or the schedule is what recurs."""
        return self.worse or self.times("input_rms") >= _LARGER or self.times("lr") >= _FASTER

    def beyond(self, amplitude: float, period: float) -> bool:
        """Whether the steps of half a period are too short to make the loss swing as it does."""
        return amplitude > BEYOND * self.reach * max(1.0, period / 2)


def beside(steps: Sequence[int], series: Mapping[str, Mapping[int, float]], period: int) -> Beside:
    """What other series do within the loss's period: medians of each of its places.

    Args:
        steps: at which the loss is known.
        series: metric -> step -> value.
        period: of the loss, in these steps.
    """
    ranges = {}
    for metric, known in series.items():
        if metric in (COSINE, REACH):
            continue
        places = [
            [
                known[step]
                for step in steps[place::period]
                if math.isfinite(known.get(step, math.nan))
            ]
            for place in range(period)
        ]
        if all(len(values) >= CYCLES for values in places):
            medians = [float(np.median(values)) for values in places]
            ranges[metric] = min(medians), max(medians)
    # What is known of single steps alone: a cosine is to the sample before.
    cosines = series.get(COSINE, {})
    consecutive = [cosines[step] for step in steps if step in cosines and step - 1 in cosines]
    reached = [value for value in series.get(REACH, {}).values() if math.isfinite(value)]
    return Beside(ranges, _median(consecutive), _median(reached))


def _median(values: Sequence[float]) -> float:
    """NaN where there are fewer than a period has to be seen times."""
    return float(np.median(values)) if len(values) >= CYCLES else math.nan


def recurs(known: Beside, period: float) -> tuple[str, str]:
    """Cause and remedy of what comes again with data or schedule."""
    every = f"one of {number(period)} steps"
    if known.times("lr") >= _FASTER:
        low, high = known.ranges["lr"]
        return (
            f"The learning rate has the same period: it is {number(high)} at {every} and down to "
            f"{number(low)} at the others. Each such step leaves what the others reached.",
            "Look at what sets the rate: two schedulers of one optimizer, one that is called with "
            "the wrong count, or a cycle that is given in epochs and goes by steps.",
        )
    if known.times("input_rms") >= _LARGER:
        low, high = known.ranges["input_rms"]
        return (
            f"The inputs have the same period: their root mean square is {number(high)} at {every} "
            f"and {number(low)} at others. They are scaled in two ways.",
            "Look at the sources that take turns, or at the worker of the loader that prepares "
            "these batches: its normalisation differs from the others'.",
        )
    low, high = known.ranges["explained_deviance"]
    return (
        f"The batches of {every} are answered no better than by a constant (they explain "
        f"{number(low)} of the deviance, others {number(high)}): their targets do not belong to "
        "their inputs, or their inputs are not like the others'.",
        "Look at samples and targets of these batches: one of the sources that take turns, or one "
        "worker of the loader, is broken.",
    )


def alternates(known: Beside, amplitude: float, period: float) -> tuple[str, str]:
    """Cause and remedy of a loss that swings further than the steps can have moved it."""
    cause = (
        f"Within {number(period)} steps it moves by {number(amplitude)} and back, and a step can "
        f"have changed it by about {number(known.reach)} (its length times the gradient's): the "
        "steps are too short to make that, so the learning rate is not why. What the loss is "
        "measured on comes and goes with this period: sources in turns, batches whose labels are "
        "other ones, a term or a sign of the loss that alternates, a schedule."
    )
    if known.cosine <= _SENT_BACK:
        cause += (
            f" Gradients of consecutive steps point against each other (cosine "
            f"{number(known.cosine)}): what one of them teaches the next one takes back."
        )
    remedy = (
        f"Look at what is different within {number(period)} steps: print source, labels and terms "
        "of the loss of as many consecutive batches."
    )
    return cause, remedy
