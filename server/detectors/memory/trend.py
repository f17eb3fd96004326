"""Does a quantity grow steadily, step after step? Pure.

Values are kept as the smallest of each block of observations: what is freed again within a block
(a larger batch, garbage until the collector comes) does not show in it, and what is never freed
does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.server.detectors.mechanisms.statistics import lag_one
from rankscope.server.window import Float64

# Autocorrelation of the residuals beyond which no more is believed: of few values it is not known
# better, and their effective number would come to nothing.
_MOST_RELATED = 0.95
# Parts of a window each of which has to grow.
_PARTS = 4
# Of the second half of a growth, as a share of the first, where its last quarter keeps 0.9 of the
# one before: of the powers of time t ** 0.68 does both. A square root has 0.41 and 0.85. With 0.9
# for the halves, too, a leak would be none for hundreds of steps after whatever was taken once at
# the beginning.
_HALF_KEEPS = 0.6
# Share of the growth by which a value off the line lies before its beginning.
_OFF = 0.02


@dataclass(frozen=True, slots=True)
class Trend:
    """A steady growth.

    Attributes:
        first: index of the first value from which on it is so.
        slope: bytes a step.
        certainty: slope over its standard error, with the autocorrelation of the residuals.
    """

    first: int
    slope: float
    certainty: float


def theil_sen(x: Float64, y: Float64) -> float:
    """Median of the slopes of all pairs of N points (Theil 1950, Sen 1968); 0 for fewer than 2."""
    if len(x) < 2:
        return 0.0
    low, high = np.triu_indices(len(x), 1)
    return float(np.median((y[high] - y[low]) / (x[high] - x[low])))


def certainty(x: Float64, y: Float64, slope: float) -> float:
    """A slope over its standard error, of N points around a line.

    Residuals that follow each other are related: by their autocorrelation r at lag 1 the effective
    number of points is N (1 - r) / (1 + r) (Bayley & Hammersley 1946). A walk without any aim has
    an r near 1, and comes to little whatever its length.
    """
    residuals = y - np.median(y - slope * x) - slope * x
    related = min(max(lag_one(residuals - residuals.mean()), 0.0), _MOST_RELATED)
    effective = max(len(x) * (1 - related) / (1 + related), 1.0)
    spread = float(np.std(residuals))
    reach = slope * float(np.std(x)) * float(np.sqrt(effective))
    return reach / max(spread, 1e-9 * abs(reach), 1e-300)


def steady(
    x: Float64, y: Float64, *, least: int, certain: float, even: float, keeps: float
) -> Trend | None:
    """The growth that goes on at the end of N points; None where there is none, or no steady one.

    Looked for in all points, in their second half and in their last quarter. What has been given
    back before, by more than half of what has been taken since, will be again.

    Args:
        x: steps, ascending.
        y: values.
        least: number of points that show it, at the least.
        certain: smallest slope over its standard error.
        even: smallest slope of each quarter of these points, as a share of that of all of them: one
            step in size is no growth.
        keeps: smallest slope of the last of these quarters, as a share of that of the first, and
            of the last quarter of all points, of that of as many before: what fills up, a cache or
            an allocator's reserve, grows more and more slowly.
    """
    count = len(x)
    for first in (0, count // 2, count - count // _PARTS):
        size = count - first
        if size < least:
            break
        slope = theil_sen(x[first:], y[first:])
        if not slope > 0 or certainty(x[first:], y[first:], slope) < certain:
            continue
        bounds = np.linspace(first, count, _PARTS + 1).astype(int)
        parts = [theil_sen(x[a:b], y[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
        if min(parts) < even * slope or parts[-1] < keeps * parts[0]:
            continue
        before = slice(max(first - size, 0), first)
        kept = _HALF_KEEPS if first == count // 2 else keeps
        if first and slope < kept * theil_sen(x[before], y[before]):
            continue
        onset = _onset(x, y, first, slope)
        if float(y[:onset].max(initial=-np.inf)) > (y[onset] + y[-1]) / 2:
            continue
        begin = _earlier(x, y, onset, slope, size // _PARTS, even)
        return Trend(begin, slope, certainty(x[first:], y[first:], slope))
    return None


def _earlier(x: Float64, y: Float64, onset: int, slope: float, size: int, even: float) -> int:
    """The first of the points before which it grew at no such pace, in parts of `size` points.

    A growth that was somewhat faster at first lies off the line, and is the same growth.
    """
    while onset >= size:
        part = slice(onset - size, onset)
        if not even * slope <= theil_sen(x[part], y[part]) <= slope / even:
            break
        onset -= size
    return onset


def _onset(x: Float64, y: Float64, first: int, slope: float) -> int:
    """The first of the points on the line through the later half of those from `first` on.

    Before it lie two in a row that are off the line; a single one is off by chance.
    """
    later = (first + len(x)) // 2
    level = float(np.median(y[later:] - slope * x[later:]))
    off = y - level - slope * x
    spread = float(np.sqrt(np.mean(off[later:] ** 2)))
    margin = max(4 * spread, _OFF * slope * float(x[-1] - x[first]))
    far = np.abs(off[:later]) > margin
    pairs = np.flatnonzero(far[:-1] & far[1:])
    return int(pairs[-1]) + 2 if len(pairs) else 0


def began(x: Float64, y: Float64, first: int, slope: float) -> int:
    """Index at which a growth began that was found in the values from `first` on."""
    while first > 0 and y[first] - y[first - 1] > 0.5 * slope * (x[first] - x[first - 1]):
        first -= 1
    return first
