"""Outputs that are so large when a model begins that its answers are far worse than none."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.series_by_step import median
from rankscope.server.detectors.mechanisms.wording import count, number

# Samples whose medians are compared, at first and at last; the very first ones are not yet what the
# steps have made of them.
_AROUND, _BEGIN = 10, 3
# Steps until then: of the recorded trainings that began so far off and were well, all had come
# below a constant answer's loss by then.
_PATIENCE = 100
# Loss over that of the best constant answer: at first at the least (embeddings as torch makes them,
# whose products have a standard deviation of 8, have 5), and after `_PATIENCE` steps.
_AT_FIRST, _AT_LAST = 5.0, 1.5
# Share of the deviance explained that is next to nothing.
_WORTH = 0.05
# Outputs over targets below which it is not the outputs that are large: targets in units of their
# own are another fault.
_SMALL = 0.5


@dataclass(frozen=True, slots=True)
class TooLarge:
    """Loss over that of the best constant answer, at first and at last, and steps between."""

    first: float
    now: float
    steps: int


@dataclass(slots=True)
class LargeOutputs:
    """Follows `explained_deviance` until it can be judged, beside `output_scale`."""

    first_step: int = -1
    early: list[float] = field(default_factory=list)
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=_AROUND))
    small: bool = False
    judged: bool = False
    watch: Watch[TooLarge] = field(default_factory=lambda: Watch(clear_after=_AROUND))

    def push(self, step: int, explained: float, scale: float) -> None:
        """Takes the share of the deviance that a step's answers explain, and outputs over targets.

        Args:
            scale: NaN where the targets are classes.
        """
        if not math.isfinite(explained):
            return
        self.first_step = step if self.first_step < 0 else self.first_step
        times = 1 - explained
        if len(self.early) < _BEGIN:
            self.early.append(times)
            self.small |= scale < _SMALL
        self.latest.append(times)
        if self.judged and len(self.latest) == _AROUND and median(self.latest) < 1:
            self.watch.good(step)
        if self.judged or step - self.first_step < _PATIENCE or len(self.latest) < _AROUND:
            return
        self.judged = True
        first, now = median(self.early), median(self.latest)
        if self.first_step > 1 or self.small or min(self.early) < _AT_FIRST:
            return  # it goes on from what was trained before; or it began well
        # What has grown since is no matter of how it began.
        if _AT_LAST < now < first:
            facts = TooLarge(first, now, step - self.first_step)
            self.watch.bad(step, facts, first_step=self.first_step)

    def worthless(self, step: int) -> bool:
        """Whether the answers are worth next to nothing after as many steps."""
        known = step - self.first_step >= _PATIENCE and len(self.latest) == _AROUND
        return known and median(self.latest) > 1 - _WORTH


def finding(episode: Episode[TooLarge]) -> Finding:
    """What is reported of it."""
    facts = episode.facts
    return episode.finding(
        kind="weights.unscaled",
        key="outputs",
        severity="warning",
        title=(
            f"The outputs begin far too large: the loss is {number(facts.first)} times that of a "
            "constant answer"
        ),
        cause=(
            f"At first the loss was {number(facts.first)} times that of the best answer that is "
            f"the same for all samples, and after {count(facts.steps, 'step')} it is still "
            f"{number(facts.now)} times that: the steps so far have gone into taking back what the "
            "model was made with, or were too small for that. Embeddings or a last layer whose "
            "weights are initialised many times too large, products that are not divided by the "
            "root of their length, logits that are multiplied by something."
        ),
        remedy=(
            "Let the first outputs be small: a standard deviation of 0.02, or 1 over the root of "
            "the width, for embeddings and the last layer; divide products by the root of their "
            "length. The first loss of a classifier is then the logarithm of the number of classes."
        ),
        evidence={"first": facts.first, "last": facts.now, "steps": facts.steps},
    )
