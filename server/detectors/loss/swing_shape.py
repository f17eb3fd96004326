"""What a window of losses shows that swings: along a sine, or in any shape that repeats."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.server.detectors.mechanisms.recurrence import Folds, detrended, folded
from rankscope.server.detectors.mechanisms.statistics import lag_one, logarithm, mann_kendall
from rankscope.server.window import Float64

# The swing over the progress made, from which it counts. The range of a shape is about twice the
# distance of its 10 % and 90 % quantiles, of which a tenth is asked; and batches in a fixed order
# differ by what their samples do, which is less.
_LARGE = 0.25
# Consecutive windows of each size: of the long ones, in which each place was seen six times over
# hundreds of steps, one is enough (`recurrence.MIN_Z`).
_WINDOWS = {64: 2, 128: 2, 256: 1, 384: 1}
LONGEST = max(_WINDOWS)
# Mann-Kendall Z below which a loss falls (one of 700 flat ones has that).
FALLING = -3.0


@dataclass(slots=True, kw_only=True)
class Swing:
    """What one window showed.

    Attributes:
        period: in observations.
        peak: share of the power around one frequency, or of the scatter that repeats.
        growth: amplitude of the last third over that of the first.
        onset: index of the first value that swings.
    """

    period: float
    lag_one: float
    peak: float
    amplitude: float
    growth: float
    trend: float
    onset: int


@dataclass(slots=True)
class Repeats:
    """Looks for shapes that repeat, over the losses of a run."""

    folds: Folds
    firing: dict[int, int]

    @classmethod
    def begin(cls) -> Repeats:
        """Nothing seen yet."""
        return cls(Folds(tuple(_WINDOWS)), dict.fromkeys(_WINDOWS, 0))

    def push(self, step: int, value: float, progress: float) -> tuple[int, Swing, bool] | None:
        """Takes a loss.

        Args:
            progress: made by the loss so far.

        Returns:
            Of a window that repeats: its first value's step, what it shows, and whether as many in
            a row did as are needed.
        """
        shown = None
        for size in self.folds.push(step, value):
            steps, values = self.folds.window(size)
            swing = repeating(values, progress)
            self.firing[size] = self.firing[size] + 1 if swing else 0
            if swing and (shown is None or self.firing[size] >= _WINDOWS[size]):
                shown = steps[swing.onset], swing, self.firing[size] >= _WINDOWS[size]
        return shown


def repeating(values: Float64, progress: float) -> Swing | None:
    """The shape that repeats in a window of losses, where it is large."""
    flat = detrended(len(values)) @ values
    if not np.ptp(values) > _LARGE * progress or not values.max() > values.min():
        return None
    signed = values.min() < 0 or not values.max() > 0
    residual = flat if signed else detrended(len(values)) @ logarithm(values)
    found = folded(residual)
    if found is None:
        return None
    places = np.arange(len(values)) % found.length
    profile = np.bincount(places, weights=flat) / np.bincount(places)
    amplitude = float(np.ptp(profile))
    if not amplitude > _LARGE * progress:
        return None
    third = len(values) // 3
    away = np.abs(residual - np.median(residual)) > 0.5 * float(np.max(np.abs(found.profile)))
    return Swing(
        period=float(found.length),
        lag_one=lag_one(residual),
        peak=found.share,
        amplitude=amplitude,
        growth=float(np.std(residual[-third:]) / max(float(np.std(residual[:third])), 1e-12)),
        # Of means over whole periods, which what repeats does not enter.
        trend=mann_kendall(_means(values, found.length)),
        onset=int(np.argmax(away)),
    )


def _means(values: Float64, length: int) -> Float64:
    """Means of consecutive pieces of this many values, the newest ones; float64 [N // length]."""
    pieces = len(values) // length
    means: Float64 = values[len(values) - pieces * length :].reshape(pieces, length).mean(axis=1)
    return means
