"""What comes again in a series: at every k-th observation, or often enough to be no chance. Pure.

Folding asks of any period, whatever the shape within it, a single tooth as well as a sine: values
that lie a period apart are put side by side, and an analysis of variance says how much of the
scatter the place within the period explains (epoch folding, Leahy et al. 1983; phase dispersion
minimisation, Stellingwerf 1978). A line of the spectrum finds the sine alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from rankscope.server.detectors.mechanisms.statistics import residual_maker, robust_sigma
from rankscope.server.window import Float64, Int64

# A period has to be seen this many times in a window: what is left of a trend turns two or three
# times in it, and three coincidences of large values among four are found in noise.
CYCLES = 6
# A run of 100,000 observations has some 6,000 windows of about 40 periods each on up to 3 scales;
# one false alarm in 1,000 runs leaves 1e-9 for each, and that is 6 standard deviations.
MIN_Z = 6.0
# Of the scatter has to be explained, or something else is what the series does.
MIN_SHARE = 0.5
# A period is taken before its multiples, which explain as much, if it explains nearly as much.
_AS_MUCH = 0.9


@dataclass(frozen=True, slots=True)
class Period:
    """What folding found.

    Attributes:
        length: of the period, in observations.
        share: of the scatter that the place within the period explains, freed of what as many
            means explain of noise.
        z: standard deviations of the F statistic, by Paulson's (1942) approximation.
        profile: mean of the values at each place, float64 [length].
    """

    length: int
    share: float
    z: float
    profile: Float64


def folded(values: Float64, *, lost: int = 3) -> Period | None:
    """The shortest period that explains the scatter of a window; None where none does.

    Args:
        values: float64 [N] around 0, without their trend.
        lost: degrees of freedom that went into the trend.
    """
    n = len(values)
    total = float(values @ values)
    if not total > 0:
        return None
    lengths, starts, means = _tables(n)
    within = means @ values
    between = np.add.reduceat(within**2, starts)
    inner, free = lengths - 1, n - lengths - lost
    left = np.maximum(total - between, 1e-12 * total)
    shares = 1.0 - left / total * (n - lost) / free
    z = _paulson(between / inner, left / free, inner, free)
    clear = np.flatnonzero((shares > MIN_SHARE) & (z > MIN_Z))
    if not len(clear):
        return None
    at = int(clear[shares[clear] >= _AS_MUCH * shares[clear].max()][0])
    length = int(lengths[at])
    profile = within[starts[at] : starts[at] + length]
    counts = np.bincount(np.arange(n) % length)
    return Period(length, float(shares[at]), float(z[at]), profile / np.sqrt(counts))


@cache
def _tables(n: int) -> tuple[Int64, Int64, Float64]:
    """All periods of which enough fit into n values, at once: one product in place of a loop.

    Returns:
        the periods, int64 [P]; the first row of each in the matrix, int64 [P]; and the matrix,
        float64 [M, n], that gives the mean at each place of each period, times the root of the
        number of values there.
    """
    lengths = np.arange(2, n // CYCLES + 1)
    rows = []
    for length in lengths.tolist():
        one = (np.arange(n) % length == np.arange(length)[:, None]).astype(np.float64)
        rows.append(one / np.sqrt(one.sum(axis=1, keepdims=True)))
    return lengths, np.cumsum(lengths) - lengths, np.concatenate(rows)


def _paulson(between: Float64, within: Float64, inner: Int64, free: Int64) -> Float64:
    """The normal deviate of ratios of variances."""
    root = np.cbrt(between / within)
    low, high = 2 / (9 * inner), 2 / (9 * free)
    z: Float64 = ((1 - high) * root - (1 - low)) / np.sqrt(high * root**2 + low)
    return z


def outliers(values: Float64, *, sigmas: float, margin: float) -> np.ndarray:
    """Places of single values far above the bulk, which is more than half of them.

    Args:
        sigmas: robust standard deviations above the median, at least.
        margin: how far above the median, at least.
    """
    middle = float(np.median(values))
    limit = middle + max(sigmas * robust_sigma(values), margin)
    return np.flatnonzero(values > limit)


@dataclass(slots=True)
class Folds:
    """Windows of one series that are due to be folded: short ones soon, long ones for long periods.

    Each is due once a quarter of it is new.
    """

    sizes: tuple[int, ...] = (64, 128, 256)
    count: int = 0
    _values: deque[tuple[int, float]] = field(init=False)

    def __post_init__(self) -> None:
        self._values = deque(maxlen=max(self.sizes))

    def push(self, step: int, value: float) -> tuple[int, ...]:
        """Takes an observation; the sizes of the windows that are due."""
        self._values.append((step, value))
        self.count += 1
        return tuple(n for n in self.sizes if self.count >= n and self.count % (n // 4) == 0)

    def window(self, size: int) -> tuple[list[int], Float64]:
        """The newest steps and values."""
        newest = list(self._values)[-size:]
        return [step for step, _ in newest], np.array([value for _, value in newest])


@cache
def detrended(size: int) -> Float64:
    """Matrix [N, N] that takes a parabola out of N values."""
    return residual_maker(size, 2)
