"""What the answers of each rank are worth: accuracies, and shares of the deviance explained."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rankscope.server.detectors.mechanisms.history import RankHistory
from rankscope.server.window import Float64, Int64


@dataclass(slots=True)
class RankAnswers:
    """The newest of every rank, of as many observations as a window has.

    Attributes:
        size: of a window.
        sigmas: standard errors that are beyond doubt.
        knows: share of the deviance from which on a rank's answers have learned something.
    """

    size: int
    sigmas: float
    knows: float
    _accuracies: RankHistory
    _explained: RankHistory

    @classmethod
    def begin(cls, size: int, *, sigmas: float, knows: float) -> RankAnswers:
        """Nothing seen yet."""
        return cls(size, sigmas, knows, RankHistory(size), RankHistory(size))

    def push(
        self, step: int, ranks: Int64, accuracies: Float64 | None, explained: Float64 | None
    ) -> None:
        """Takes what every rank posted of a step, float64 [R]; None where nobody did."""
        if accuracies is not None:
            self._accuracies.push(step, ranks, accuracies.copy())
        if explained is not None:
            self._explained.push(step, ranks, explained.copy())

    def accuracies(self, known: Int64, who: tuple[int, ...]) -> tuple[float, float]:
        """Mean accuracy of the suspect ranks and of the others; NaN where there is none."""
        accuracies = self._accuracies.matrix(known)
        suspects = np.isin(known, who)
        if not len(accuracies) or suspects.all() or not np.isfinite(accuracies).any(axis=0).all():
            return math.nan, math.nan
        return float(np.nanmean(accuracies[:, suspects])), float(
            np.nanmean(accuracies[:, ~suspects])
        )

    def know_nothing(self, known: Int64, rank: int, *, worse: bool) -> bool:
        """Whether one rank's answers alone say nothing, where those of each other rank do.

        Args:
            worse: whether they have to be beyond doubt worse than a constant one would be, or no
                better than that on average.
        """
        shares = self._explained.matrix(known)
        if len(shares) < self.size or not np.isfinite(shares).all():
            return False
        means = shares.mean(axis=0)
        errors = self.sigmas * shares.std(axis=0) / math.sqrt(len(shares))
        column = int(np.searchsorted(known, rank))
        others = np.arange(len(known)) != column
        own = means[column] + (errors[column] if worse else 0.0)
        return bool(own < 0 and (means[others] > self.knows + errors[others]).all())
