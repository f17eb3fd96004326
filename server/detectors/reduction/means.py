"""Means over each rank's own tokens or samples, of unequal numbers of which the mean is taken."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Condition, Episode, Watch
from rankscope.server.detectors.mechanisms.wording import count, number, ranks
from rankscope.server.window import Float64, Reduction, Window

# The largest number of a step over the smallest, as of `data.imbalanced`, and steps that have it,
# half of all: the last batch of an epoch may be short.
_UNEVEN, _SAMPLES = 2.0, 8
# Exponent with which a rank's norm goes with its number. Of a sum it is between 1/2 (all noise) and
# 1 (all signal), of a mean between -1/2 and 0; known to 3 standard errors.
_OF_A_SUM, _SIGMAS = 0.25, 3.0


@dataclass(slots=True)
class Uneven:
    """What was seen at the last step of an episode.

    Attributes:
        what: `tokens` or `samples`.
        most, least: the rank with the most and that with the fewest, and how many they have.
        slope: exponent of the norms.
    """

    what: str
    most: tuple[int, float]
    least: tuple[int, float]
    slope: float


@dataclass(slots=True)
class Means(Condition[Uneven]):
    """What reductions whose ranks count equally show of how much is in each rank's mean.

    Attributes:
        sampled: steps with numbers of tokens or samples; `uneven` of them differ much.
        xx, xy, yy: squares and products of the logarithms of numbers and norms  less their
            means over ranks, of `free` degrees of freedom.
    """

    sampled: int = 0
    uneven: int = 0
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0
    free: int = 0
    watch: Watch[Uneven] = field(default_factory=lambda: Watch(clear_after=16))

    def observe(self, window: Window, made: Reduction, counts: Mapping[str, Float64]) -> None:
        """A reduction that was the mean, with equal weights."""
        what, held = next(iter(counts.items()), ("", np.zeros(0)))
        if not what or not (np.isfinite(held) & (held > 0)).all():
            return
        self.sampled += 1
        spread = float(held.max() / held.min())
        self.uneven += spread >= _UNEVEN
        if spread > 1.0:
            self._norms(window, made, held)
        often = self.uneven >= _SAMPLES and 2 * self.uneven >= self.sampled
        if not often:
            self.watch.good(made.step)
        elif spread >= _UNEVEN and self._are_means():
            rows = int(np.argmax(held)), int(np.argmin(held))
            most, least = ((int(made.ranks[row]), float(held[row])) for row in rows)
            found = Uneven(what, most, least, self.xy / self.xx)
            self.watch.bad(made.step, found).facts = found

    def finding(self, episode: Episode[Uneven]) -> Finding:
        """What is reported of an episode."""
        return _finding(episode)

    def _norms(self, window: Window, made: Reduction, held: Float64) -> None:
        norms = window.series.get("grad_norm_local")
        if norms is None:
            return
        column = int(np.searchsorted(window.steps, made.step))
        rows = np.flatnonzero(np.isin(window.ranks, made.ranks) & norms.present[:, column])
        values = norms.values[rows, column]
        if len(values) != len(held) or not (np.isfinite(values) & (values > 0)).all():
            return
        x, y = np.log(held), np.log(values)
        x, y = x - x.mean(), y - y.mean()
        self.xx += float(x @ x)
        self.xy += float(x @ y)
        self.yy += float(y @ y)
        self.free += len(x) - 1

    def _are_means(self) -> bool:
        """Whether the norms show that each rank's gradient is a mean, and no sum."""
        if self.free < _SAMPLES:
            return False
        slope = self.xy / self.xx
        error = math.sqrt(max(self.yy - slope * self.xy, 0.0) / (self.free - 1) / self.xx)
        return slope + _SIGMAS * error < _OF_A_SUM


def _finding(episode: Episode[Uneven]) -> Finding:
    facts, step = episode.facts, episode.first_step
    (more, many), (less, few) = facts.most, facts.least
    one = facts.what.removesuffix("s")
    return episode.finding(
        kind="reduction.wrong",
        key="means",
        severity="info",
        title=f"Ranks of unequal numbers of {facts.what} count equally since step {step}",
        stage="reduced_gradient",
        cause=(
            f"The reduction gives each rank the same weight, and each rank's gradient is a mean "
            f"over its own {facts.what}: a mean of means. At the last of "
            f"{count(episode.seen, 'checked step')} {ranks([more])} had {number(many)} "
            f"{facts.what} and {ranks([less])} {number(few)}, so that a {one} of {ranks([less])} "
            f"counted {number(many / few)} times as much."
        ),
        remedy=(
            f"Where every {one} should count the same, multiply each rank's loss by its number of "
            f"{facts.what} and the number of ranks, and divide it by the number of {facts.what} "
            "of all ranks, or give the ranks the same number. Where it is meant, silence this kind."
        ),
        evidence={
            "pattern": "means",
            "what": facts.what,
            "factor": many / few,
            "slope": facts.slope,
            "observed": episode.seen,
        },
    )
