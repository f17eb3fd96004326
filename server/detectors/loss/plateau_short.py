"""A loss that stays where it is, of a run too short for a hundred losses at rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rankscope.server.detectors.mechanisms.series_by_step import median, noise_of_mean
from rankscope.server.detectors.mechanisms.statistics import mann_kendall

if TYPE_CHECKING:
    from rankscope.server.detectors.loss.plateau_policy import PlateauPolicy

# Losses of a piece, whose median stands for it.
_PIECE = 10


def answers_nothing(
    losses: Sequence[float], shares: Sequence[tuple[int, float]], total: int, policy: PlateauPolicy
) -> bool:
    """Whether answers are beyond doubt worth no more than one that is always the same, and stay so.

    Sooner than where a hundred losses are at rest, so more is asked: the losses of the last half of
    the run show no fall at all, and what is explained is nothing and has not grown from the quarter
    before, by a standard error.

    Args:
        losses: the latest, in their order.
        shares: number of the loss, from 1, and share of the deviance explained there.
        total: number of losses so far.
        policy: its `explained`, `shares` and `arriving`.
    """
    half, quarter = total // 2, total // 4
    latest = list(losses)[-half:]
    pieces = [latest[at : at + _PIECE] for at in range(0, half, _PIECE)]
    if mann_kendall([median(piece) for piece in pieces]) < -policy.arriving:
        return False
    recent = [share for at, share in shares if at > total - half]
    before = [share for at, share in shares if total - half - quarter < at <= total - half]
    if min(len(recent), 2 * len(before)) < policy.shares:
        return False
    error = noise_of_mean(recent)
    mean, was = float(np.mean(recent)), float(np.mean(before))
    # Answers that are worse than that come up to it, whatever the inputs say.
    if max(mean, 0.0) - max(was, 0.0) > math.hypot(error, noise_of_mean(before)):
        return False
    return mean + error <= policy.explained
