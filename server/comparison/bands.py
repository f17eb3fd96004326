"""What one more run of the same training would give: a limit, with its confidence. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from rankscope.server.window import Float64

# One run in a hundred of the same training lies beyond the limit of a measure.
CONFIDENCE = 0.99
# How many runs the assumed spread counts for beside those that there are (a scaled inverse chi
# squared prior, as in Smyth 2004). Between sorts of trainings the steps to a loss, and between
# machines times, spread by a factor of about two more or less than is assumed: that is a variance
# of 4 degrees of freedom, or fewer.
ASSUMED_DEGREES = 4
# By so much seeds learn faster or slower (standard deviation of the logarithm of the steps to a
# loss), where no runs have shown it: of 30 seeds of small classifiers it is 0.03 to 0.09.
ASSUMED_SPEED = 0.07


@dataclass(frozen=True, slots=True)
class Band:
    """Where one more run is expected, on whatever scale the runs were given.

    Attributes:
        expected: mean of the runs.
        spread: standard deviation between runs, what is assumed of it included.
        reach: how far above `expected` one more run lies in one of a hundred cases, or as rarely as
            was asked for.
        runs: number of runs.
    """

    expected: float
    spread: float
    reach: float
    runs: int

    @property
    def limit(self) -> float:
        """The one-sided prediction limit."""
        return self.expected + self.reach


def band(
    levels: Float64,
    *,
    assumed: float,
    noisier: float = 0.0,
    degrees: int = ASSUMED_DEGREES,
    confidence: float = CONFIDENCE,
) -> Band:
    """The prediction limit for one more run beside those given, float64 [N], N >= 1.

    Student's t of a normal sample: `t * s * sqrt(1 + 1/N)`. Of one run or two the spread is known
    badly or not at all; the assumed one stands in and loses its weight as runs are added.

    Args:
        assumed: standard deviation between runs before any was seen.
        noisier: standard error that the new run has in excess of theirs.
        degrees: of freedom of what is assumed.
        confidence: share of runs of the same training that lie below the limit.
    """
    n = len(levels)
    expected = float(levels.mean())
    of_both = degrees + n - 1
    squares = float(((levels - expected) ** 2).sum())
    variance = (degrees * assumed**2 + squares) / of_both
    error = math.sqrt(variance * (1 + 1 / n) + noisier**2)
    return Band(expected, math.sqrt(variance), t_quantile(confidence, of_both) * error, n)


@cache
def t_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t, for a probability of at least one half.

    By bisection on the angle `atan(t / sqrt(degrees))`, in which the distribution is a finite sum
    for whole degrees of freedom (Abramowitz and Stegun 26.7.3, 26.7.4).
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if 0.5 + 0.5 * _within(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(low)


def _within(angle: float, degrees: int) -> float:
    """Probability that |t| is at most `sqrt(degrees) * tan(angle)`."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def mean_error(values: Float64) -> float:
    """Standard error of the mean of consecutive values around their linear trend, float64 [N].

    Neighbours depend on each other: the autocovariances are added up in pairs as long as these are
    above 0 (Geyer 1992). 0 for fewer than 4 values.
    """
    n = len(values)
    if n < 4:
        return 0.0
    x = np.arange(n) - (n - 1) / 2
    around = values - values.mean()
    around = around - x * float(x @ around) / float(x @ x)
    products = np.correlate(around, around, "full")[n - 1 :] / (n - 2)
    if not products[0] > 0:
        return 0.0
    pairs = products[: n // 2 * 2].reshape(-1, 2).sum(axis=1)
    ends = np.flatnonzero(pairs <= 0)
    total = 2 * float(pairs[: ends[0] if len(ends) else len(pairs)].sum()) - float(products[0])
    # Batches without replacement scatter less than independent ones; how much less, so few do not
    # say.
    return math.sqrt(max(total, float(products[0]) / 2) / n)


def falling(values: Float64) -> tuple[Float64, Float64]:
    """The never rising course that is nearest to the values: its blocks.

    Pools adjacent values that rise (isotonic regression, Barlow et al. 1972): noise is smoothed as
    far as the course is flat, and no width has to be chosen.

    Returns:
        level of each block, descending, and the place of its middle among the values.
    """
    levels: list[float] = []
    sizes: list[int] = []
    for value in values.tolist():
        levels.append(value)
        sizes.append(1)
        while len(levels) > 1 and levels[-2] <= levels[-1]:
            level, size = levels.pop(), sizes.pop()
            levels[-1] = (levels[-1] * sizes[-1] + level * size) / (sizes[-1] + size)
            sizes[-1] += size
    lengths = np.array(sizes, dtype=np.float64)
    return np.array(levels), np.cumsum(lengths) - (lengths + 1) / 2
