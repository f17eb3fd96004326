"""A loss that falls below zero faster and faster: what is minimised has no minimum. Pure.

That it falls is what every other question about a loss takes for progress.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.statistics import BLOCK
from rankscope.server.detectors.mechanisms.wording import number, sentences

# Losses that are needed, and of these the first ones, whose size is what is usual.
_LEAST, _FIRST = 10 * BLOCK, 2 * BLOCK
# Times that size below zero: a log likelihood of a density comes to some times where it began.
_FAR = 30.0
# Power of the number of steps, in both halves of the last half of the run. A likelihood falls ever
# more slowly, steps of one size along a slope make it 1, and a slope that grows with the parameters
# that climb it makes it 2 and more.
_POWER = 1.25
# Times the parameters have grown since the start. Values of states (an actor's loss) may fall as
# fast while rewards are found, by parameters of usual size.
_GROWN = 2.0
# Times the first losses' size below zero that no sum of rewards and no likelihood comes to: a
# density of 64 dimensions, each of them known to one part in 10^5, has a logarithm of 740.
_BEYOND = 1e8


@dataclass(frozen=True, slots=True)
class Falls:
    """What was seen: the first losses' size, the loss now, and how it falls with the steps.

    Attributes:
        power: 0 where it does not fall from half of the steps on.
        grown: norm of the parameters over the first one.
    """

    size: float
    now: float
    power: float
    grown: float


@dataclass(slots=True)
class Bottomless:
    """Follows the losses of a run.

    Attributes:
        levels: last step and median of each block of 10 losses.
        norms: first and last norm of the parameters.
    """

    first: list[float] = field(default_factory=list)
    block: list[float] = field(default_factory=list)
    levels: list[tuple[int, float]] = field(default_factory=list)
    norms: tuple[float, float] = (math.nan, math.nan)
    watch: Watch[Falls] = field(default_factory=lambda: Watch(clear_after=50))

    def norm(self, value: float) -> None:
        """Takes a norm of the parameters."""
        if math.isfinite(value) and value > 0:
            first = value if math.isnan(self.norms[0]) else self.norms[0]
            self.norms = first, value

    def push(self, step: int, loss: float) -> None:
        """Takes a finite loss."""
        if len(self.first) < _FIRST:
            self.first.append(abs(loss))
        self.block.append(loss)
        if len(self.block) < BLOCK:
            return
        self.levels.append((step, float(np.median(self.block))))
        self.block.clear()
        # What lies between two of them is of no use once there are many.
        if len(self.levels) >= 1024:
            self.levels = self.levels[1::2]
        if len(self.first) == _FIRST:
            self._judge(step)

    def _judge(self, step: int) -> None:
        size = float(np.median(self.first))
        now = self.levels[-1][1]
        far = size > 0 and now < -_FAR * size
        known = self.watch.open(step)
        if known is not None and known.holding and far:
            # Where it has come to is no minimum, though it may fall no further.
            facts = Falls(size, now, known.facts.power, self._grown())
            self.watch.bad(step, facts).facts = facts
            return
        power = self._power() if far else 0.0
        # Of advantages that are normalised the first loss is rounding.
        beyond = far and now < -_BEYOND * max(size, 1.0)
        if beyond or (power > _POWER and self._grown() > _GROWN):
            onset = next(at for at, level in self.levels if level < -size)
            facts = Falls(size, now, power, self._grown())
            self.watch.bad(step, facts, first_step=onset).facts = facts
        else:
            self.watch.good(step)

    def _grown(self) -> float:
        return self.norms[1] / self.norms[0]

    def _power(self) -> float:
        """The smaller one of the two by which it falls from half of the steps on."""
        begin, end = self.levels[0][0], self.levels[-1][0]
        if len(self.levels) * BLOCK < _LEAST:
            return 0.0
        at = [begin + share * (end - begin) for share in (0.5, 0.75)]
        points = [next((s, v) for s, v in reversed(self.levels) if s <= limit) for limit in at]
        points.append(self.levels[-1])
        powers = []
        for (early, before), (late, after) in zip(points, points[1:], strict=False):
            if not after < before < 0 or early <= begin:
                return 0.0
            powers.append(math.log(after / before) / math.log((late - begin) / (early - begin)))
        return min(powers)


def finding(episode: Episode[Falls], *, game: bool) -> Finding:
    """What is reported of it."""
    facts = episode.facts
    return episode.finding(
        kind="loss.diverging",
        key="below",
        severity="info" if game else "critical",
        title=(
            f"The loss falls below every bound since step {episode.first_step}: from a size of "
            f"{number(facts.size)} to {number(facts.now)}"
        ),
        cause=sentences(
            f"It fell with the power {number(facts.power)} of the number of steps, and the "
            f"parameters have grown {number(facts.grown)}-fold: the further it falls, the faster."
            if facts.power
            else f"It is {number(-facts.now / facts.size)} times as far below zero as the first "
            "losses were large.",
            "What is minimised has no minimum: its sign is wrong, or what bounds it from below is "
            "missing (a logarithm, a sigmoid, a square, a margin), so that the largest outputs "
            "are the best.",
            "One player of a game without a constraint does the same." if game else "",
        ),
        remedy=(
            "Compute the loss by hand for one perfect answer and for one that is ten times as "
            "large: the perfect one has to have the lower loss. Look at the signs of its terms, "
            "and at what each function expects (scores, probabilities or their logarithms). What "
            "was trained since the start is of no use."
        ),
        evidence={
            "first": facts.size,
            "last": facts.now,
            "power": facts.power,
            "grown": facts.grown,
        },
    )
