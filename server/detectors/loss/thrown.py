"""A loss that the first steps threw up, and that has not come back to where it began."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.episode import Episode, Watch
from rankscope.server.detectors.walking import noise_of_mean
from rankscope.server.detectors.wording import number, sentences

# First losses among which the rise is looked for; losses before it is judged, and the latest of
# them that are averaged. Of 86 healthy trainings the loss of none was above its first one by then
# after such a rise, but for one whose first loss was that of another task than its second.
_FIRST, _PATIENCE, _LATEST = 20, 100, 30
# The rise over the first loss, as a share of it, and over what single losses differ by, in standard
# deviations; and how many of the first losses have to show it: one batch may be odd.
_RISE, _CLEAR, _SEVERAL = 0.5, 6.0, 3
# Share of the latest losses that may lie below the first one: of two tasks in turns half do.
_LOW = 0.2


@dataclass(frozen=True, slots=True)
class Thrown:
    """What was seen: the first loss, the highest of the first ones, and the mean of the latest."""

    first: float
    highest: float
    now: float


@dataclass(slots=True)
class ThrownUp:
    """Follows the losses from the first one on.

    Attributes:
        over: whether the loss has come back, or was never thrown up.
    """

    first_step: int = -1
    early: list[float] = field(default_factory=list)
    count: int = 0
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST))
    over: bool = False
    watch: Watch[Thrown] = field(default_factory=lambda: Watch(clear_after=_LATEST))

    def push(self, step: int, loss: float, *, known: bool) -> None:
        """Takes a finite loss; `known`: it is said to diverge already."""
        if self.over:
            return
        if not self.count:
            self.first_step = step
        if len(self.early) < _FIRST:
            self.early.append(loss)
        self.count += 1
        self.latest.append(loss)
        if self.count < _PATIENCE:
            return
        if self.first_step > 0:
            self.over = True  # it goes on from what was trained before
            return
        first, now = self.early[0], float(np.mean(self.latest))
        low = float(np.quantile(self.latest, _LOW))
        if not first > 0 or low <= first or (known and self.watch.current is None):
            self.over = True
            self.watch.good(step)
            return
        if self.watch.current is None:
            scatter = noise_of_mean(self.latest) * math.sqrt(len(self.latest))
            limit = max((1 + _RISE) * first, now + _CLEAR * scatter)
            self.over = sum(value > limit for value in self.early) < _SEVERAL
        if not self.over:
            facts = Thrown(first, max(self.early), now)
            self.watch.bad(step, facts, first_step=self.first_step).facts = facts


def finding(episode: Episode[Thrown], *, game: bool) -> Finding:
    """What is reported of it; `game`: another optimizer steps in turns with this one."""
    facts = episode.facts
    return episode.finding(
        kind="loss.diverging",
        key="start",
        severity="info" if game else "warning",
        title=(
            f"The first steps threw the loss up from {number(facts.first)} to "
            f"{number(facts.highest)}, and it has not come back"
        ),
        cause=sentences(
            f"Within {_FIRST} losses of the start the loss rose from {number(facts.first)} to "
            f"{number(facts.highest)}; it has come to {number(facts.now)}, and is still above "
            "where it began: what the weights were initialised to is gone, and nothing has taken "
            "its place. The learning rate is too high for the first steps, without a warm-up; or "
            "the first steps were taken with other data, targets or a loss of another scale.",
            "Two players of a game may do that." if game else "",
        ),
        remedy=(
            "Train anew with a tenth of the learning rate and a warm-up of some hundred steps, and "
            "clip the gradient to limit single steps. If the loss rises as before, compare the "
            "first batches with later ones."
        ),
        evidence={"first": facts.first, "highest": facts.highest, "last": facts.now},
    )
