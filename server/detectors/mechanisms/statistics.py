"""Robust statistics that the detectors share. Pure; free of scale or on the loss's own.

A detector walks over *observations*: steps at which something was posted. Evidence is counted in
them and not in steps, so that a series logged at every fifth step is not taken for five times the
evidence. Thresholds and their calibration: `tests/lab/corpus`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rankscope.server.window import Float64, Int64, Window

# Makes the median absolute deviation of normal noise its standard deviation.
_MAD_TO_SIGMA = 1.4826

# Relative difference up to which two numbers are the same.
_TIE = 1e-9

# Largest F by chance of all places at which one parameter may change (Andrews 1993, table 1; 1 %).
_SUP_F = 12.35

# Observations whose median makes one value of a trend.
BLOCK = 10


def mean_over_ranks(window: Window, metric: str) -> tuple[Int64, Float64]:
    """Steps at which any rank posted a metric, int64 [N], and its mean there, float64 [N].

    The mean is not finite where a rank's value is not. Read-only: all detectors share them.
    """
    known = window.derived.get(("mean", metric))
    if known is None:
        known = shared(window, "mean", metric, _mean_over_ranks(window, metric))
    return known[0], known[1]


def rank_rows(window: Window, metric: str) -> tuple[Int64, Float64]:
    """Steps at which any rank posted a metric, int64 [N], and every rank's value, float64 [N, R].

    NaN where a rank posted nothing; what it posted need not be finite either. Read-only: all
    detectors share them.
    """
    known = window.derived.get(("rows", metric))
    if known is None:
        known = shared(window, "rows", metric, _rank_rows(window, metric))
    return known[0], known[1]


def shared(
    window: Window, what: str, metric: str, made: tuple[npt.NDArray[Any], ...]
) -> tuple[npt.NDArray[Any], ...]:
    """Keeps what was computed of a metric with its window, read-only, for other detectors."""
    for array in made:
        array.flags.writeable = False
    window.derived[what, metric] = made
    return made


def _mean_over_ranks(window: Window, metric: str) -> tuple[Int64, Float64]:
    series = window.series.get(metric)
    if series is None:
        return np.empty(0, dtype=np.int64), np.empty(0)
    posted = series.present.sum(axis=0)
    some = np.flatnonzero(posted)
    # Ranks along the last axis: numpy then adds each step up in the same order whatever the number
    # of steps, and the last bits do not depend on how the steps were cut into windows.
    present = np.ascontiguousarray(series.present[:, some].T)
    values = np.where(present, np.ascontiguousarray(series.values[:, some].T), 0.0)
    with np.errstate(invalid="ignore", over="ignore"):
        means = np.add.reduce(values, axis=1) / posted[some]
    return window.steps[some], means


def _rank_rows(window: Window, metric: str) -> tuple[Int64, Float64]:
    series = window.series.get(metric)
    if series is None:
        return np.empty(0, dtype=np.int64), np.empty((0, len(window.ranks)))
    some = np.flatnonzero(series.present.any(axis=0))
    rows = np.where(series.present[:, some].T, series.values[:, some].T, np.nan)
    return window.steps[some], rows


def known_median(values: Float64, axis: int = 0) -> Float64:
    """Median of what is not NaN along an axis; NaN where nothing is known, and no warning then."""
    known = (~np.isnan(values)).any(axis=axis)
    if known.all():
        return np.asarray(np.nanmedian(values, axis=axis))
    found: Float64 = np.full(known.shape, np.nan)
    found[known] = np.nanmedian(np.moveaxis(values, axis, -1)[known], axis=-1)
    return found


def median_of_sorted(ordered: Float64, counts: Int64) -> Float64:
    """Median of the first `counts` values of each row, float64 [N]; `counts` are at least 1."""
    rows = np.arange(len(ordered))
    middle: Float64 = 0.5 * (ordered[rows, (counts - 1) // 2] + ordered[rows, counts // 2])
    return middle


def logarithm(values: Float64) -> Float64:
    """Logarithm of values of which none is negative; a 0 counts as almost nothing."""
    return np.log(np.maximum(values, 1e-12 * float(values.max())))


def exceeds(value: float, limit: float) -> bool:
    """Whether a value lies above a limit, whatever unit both are in.

    A tie stays one: a factor on both sides must not decide it by the last bit.
    """
    return value > limit + _TIE * abs(limit)


def robust_sigma(values: Float64) -> float:
    """Standard deviation of the bulk: 1.4826 times the median absolute deviation."""
    return _MAD_TO_SIGMA * float(np.median(np.abs(values - np.median(values))))


def median_error(values: Float64, size: int) -> float:
    """Standard error of the logarithm of a median of `size` values, of which none is negative.

    From the differences of neighbours (von Neumann 1941), which a trend hardly enters; of normal
    noise a median errs by 1.2533 times as much as a mean. 0 for fewer than 3 values.
    """
    if len(values) < 3 or not values.max() > 0:
        return 0.0
    single = robust_sigma(np.diff(logarithm(values))) / math.sqrt(2)
    return 1.2533 * single / math.sqrt(size)


def mann_kendall(values: Sequence[float] | Float64) -> float:
    """Z of a monotone trend: above 0 rising, below falling; 0 for fewer than 3 values.

    Mann (1945), Kendall (1975); without a correction for ties, which only makes Z smaller.
    """
    y = np.asarray(values, dtype=np.float64)
    n = len(y)
    if n < 3:
        return 0.0
    score = float(np.sign(y[None, :] - y[:, None])[np.triu_indices(n, 1)].sum())
    spread = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    return (score - math.copysign(min(1.0, abs(score)), score)) / spread


def grows_with(cause: Float64, values: Float64) -> bool:
    """Whether values are a multiple of something else from the first one on.

    Against it stands that they are 0 up to some place, and from there on a multiple of it or
    constant. This explains more where the best such place lowers the sum of squares by more than
    chance would (sup F: Andrews 1993, table 1, one parameter and 15 % left out at either end, 12.35
    at 1 %), as where the cause had moved long before them. The multiple has to explain half of the
    sum of squares, too: of what is noise or comes now and then it is no account.

    Args:
        cause: float64 [N], of which they may be a multiple.
        values: float64 [N], N of 20 and more; fewer show nothing.
    """
    count = len(values)
    least = int(0.15 * count)
    if count < 20 or not np.isfinite(cause).all():
        return False
    # Sums over i and all after it: what the multiple explains of the squares, from each place on.
    product = np.cumsum((cause * values)[::-1])[::-1]
    square = np.cumsum((cause * cause)[::-1])[::-1]
    total = float(values @ values)
    as_cause = product**2 / np.maximum(square, 1e-300)
    if product[0] <= 0 or as_cause[0] < 0.5 * total:
        return False
    constant = np.cumsum(values[::-1])[::-1] ** 2 / np.arange(count, 0, -1)
    best = float(np.maximum(as_cause, constant)[least : count - least].max())
    rest = max(total - best, 1e-300) / (count - 2)
    return bool((best - as_cause[0]) / rest <= _SUP_F)


def change_point(values: Float64) -> tuple[int, float, float]:
    """Where one level gives way to another: index of the first value of the second.

    The split with the least sum of squares around two means (binary segmentation, Scott & Knott
    1974).

    Returns:
        index in 1..N-1, mean before, mean after; index 0 and the same mean twice for N < 2.
    """
    n = len(values)
    if n < 2:
        mean = float(values.mean()) if n else 0.0
        return 0, mean, mean
    sums = np.cumsum(values)
    left = np.arange(1, n)
    before = sums[:-1] / left
    after = (sums[-1] - sums[:-1]) / (n - left)
    at = int(np.argmax(left * (n - left) * (before - after) ** 2))
    return at + 1, float(before[at]), float(after[at])


def lag_one(residuals: Float64) -> float:
    """Autocorrelation at lag 1 of residuals around 0; -1 for a strict zigzag."""
    total = float(residuals @ residuals)
    return float(residuals[1:] @ residuals[:-1]) / total if total > 0 else 0.0


def times_fewer(residuals: Float64) -> float:
    """How many times fewer independent values say as much of a mean as these do.

    (1 + r) / (1 - r) with the autocorrelation r at lag 1, as of a first-order autoregression; 1
    where neighbours are unlike each other.
    """
    along = min(max(lag_one(residuals), 0.0), 0.999)
    return (1 + along) / (1 - along)


def spectral_peak(residuals: Float64, *, skip: int = 4) -> tuple[float, float]:
    """How much of the residuals' power lies around one frequency, and its period.

    Fisher's g (1929) on a periodogram with a Hann taper, whose main lobe is the peak and both its
    neighbours: they are added up, so that g does not depend on where between two bins the
    frequency lies. Without the `skip` lowest frequencies, which a trend left over would fill.
    White noise of 64 values exceeds 0.53 in one of 1,000 windows, 0.65 in one of 100,000.

    Returns:
        g in [0, 1] and the period in observations.
    """
    n = len(residuals)
    power = np.abs(np.fft.rfft(residuals * np.hanning(n))) ** 2
    total = float(power[skip:].sum())
    if not total > 0:
        return 0.0, math.inf
    peak = skip + int(np.argmax(power[skip:]))
    share = float(power[max(peak - 1, skip) : peak + 2].sum()) / total
    while peak > 1 and power[peak - 1] > power[peak]:
        peak -= 1  # the flank of a frequency that is left out
    lobe = np.arange(peak - 1, min(peak + 2, len(power)))
    # The lobe's centre of gravity places the frequency between the bins.
    return share, n * float(power[lobe].sum()) / float(power[lobe] @ lobe)


def residual_maker(n: int, degree: int) -> Float64:
    """Matrix [n, n] that takes a polynomial trend out of n values."""
    x = np.vander(np.linspace(-1, 1, n), degree + 1)
    maker: Float64 = np.eye(n) - x @ np.linalg.pinv(x)
    return maker


@dataclass(slots=True)
class Spacing:
    """Steps from one observation to the next, so that observations can be given in steps."""

    first: int = -1
    last: int = -1
    count: int = 0

    def push(self, step: int) -> None:
        """Takes the next observation's step."""
        if self.count == 0:
            self.first = step
        self.last = step
        self.count += 1

    def push_all(self, first: int, last: int, count: int) -> None:
        """Takes the next observations, at least one, by the first and last one's steps."""
        if self.count == 0:
            self.first = first
        self.last = last
        self.count += count

    @property
    def interval(self) -> float:
        """Mean number of steps from one observation to the next; 1 before there are two."""
        return (self.last - self.first) / (self.count - 1) if self.count > 1 else 1.0

    def steps(self, observations: int) -> int:
        """How many steps this many observations take."""
        if self.count < 2:
            return observations
        return math.ceil(observations * (self.last - self.first) / (self.count - 1))


@dataclass(slots=True)
class Unmeasured:
    """Consecutive observations that are not finite: from a block of them on nothing can be judged.

    Single ones are not: a loss scale that was too large skips a step and goes on.

    Attributes:
        since: step of the first of them.
    """

    since: int = -1
    count: int = 0

    def push(self, step: int, *, finite: bool) -> None:
        """Takes the next observation."""
        if finite:
            self.count = 0
            return
        self.since = step if self.count == 0 else self.since
        self.count += 1

    @property
    def lasting(self) -> bool:
        """Whether there are too many for anything to be judged."""
        return self.count >= BLOCK


@dataclass(slots=True)
class Progress:
    """How far a loss has come: the scale on which its anomalies are measured.

    0.005 -> 0.05 is ten times as much and irrelevant where the run began at 2.5. The start is the
    smaller of the medians of the first 5 and of the first 20 observations (a fast run has left its
    start behind after 20), the best the lowest median of a block of 10.

    Attributes:
        start: NaN before 5 observations.
        best: infinite before 10 observations.
        best_step: last step of the block that set `best`.
    """

    count: int = 0
    start: float = math.nan
    best: float = math.inf
    best_step: int = -1
    spacing: Spacing = field(default_factory=Spacing)
    _first: list[float] = field(default_factory=list)
    _block: list[float] = field(default_factory=list)
    _block_start: int = -1

    def push(self, step: int, value: float) -> tuple[int, int, float] | None:
        """Takes the next value.

        Returns:
            First step, last step and median of the block that it completed, if any.
        """
        self.count += 1
        self.spacing.push(step)
        if self.count <= 20:
            self._first.append(value)
            if self.count == 5:
                self.start = float(np.median(self._first))
            elif self.count == 20:
                self.start = min(self.start, float(np.median(self._first)))
        if not self._block:
            self._block_start = step
        self._block.append(value)
        if len(self._block) < BLOCK:
            return None
        median = float(np.median(self._block))
        self._block.clear()
        if median < self.best:
            self.best, self.best_step = median, step
        return self._block_start, step, median

    @property
    def scale(self) -> float:
        """Progress made: start minus best, at least 0."""
        gained = self.start - self.best
        return gained if gained > 0 and math.isfinite(gained) else 0.0

    @property
    def began(self) -> float:
        """The start, or the first value where there are too few for it; NaN before that."""
        first = self._first[0] if self._first else math.nan
        return self.start if math.isfinite(self.start) else first

    @property
    def from_first(self) -> float:
        """As `scale`, from the very first value: of a run that has left its start within 5."""
        gained = self._first[0] - self.best if self._first else math.nan
        return max(self.scale, gained) if math.isfinite(gained) else self.scale


class Baseline:
    """The last accepted values of a series, and how far a new one lies above them.

    What was alarmed about is not accepted, so that a disturbance does not become its own measure.

    Args:
        size: number of values remembered.
        floor: smallest standard deviation that is believed, on the scale of the logarithm.
    """

    def __init__(self, size: int = 64, floor: float = 0.02) -> None:
        self.values: deque[float] = deque(maxlen=size)
        self._floor = floor
        self._highest: deque[tuple[int, float]] = deque()
        self._count = 0

    def __len__(self) -> int:
        return len(self.values)

    @property
    def highest(self) -> float:
        """Largest value remembered."""
        return self._highest[0][1]

    @property
    def positive(self) -> bool:
        """Whether the values allow a logarithm: none is negative, and not all are 0."""
        return min(self.values, default=1.0) >= 0 and max(self.values, default=1.0) > 0

    def accept(self, value: float) -> None:
        """Takes a value among those remembered."""
        # The maximum of a sliding window: those that a later, larger one outlives are dropped.
        while self._highest and self._highest[-1][1] <= value:
            self._highest.pop()
        self._highest.append((self._count, value))
        self._count += 1
        self.values.append(value)
        if self._highest[0][0] <= self._count - 1 - (self.values.maxlen or 0):
            self._highest.popleft()

    def z(self, value: float) -> float:
        """Robust z of a new value around the window's own trend.

        On the logarithm where all values allow it: losses and norms err by factors, and so the
        noise of a falling loss is the same at 2.5 and at 0.005. The trend is the slope between the
        medians of the two halves.
        """
        y, new, floor = self._scaled(value)
        around, expected = self._flat(y)
        return _deviations(new - expected, max(robust_sigma(around), floor))

    def z_of_newest(self, value: float, count: int) -> float:
        """The same over the newest values alone, by their scatter or the window's, the larger."""
        y, new, floor = self._scaled(value)
        around, _ = self._flat(y)
        late = y[-count:]
        sigma = max(robust_sigma(around), robust_sigma(late), floor)
        return _deviations(new - float(np.median(late)), sigma)

    def _scaled(self, value: float) -> tuple[Float64, float, float]:
        """The values, a new one and the floor, on the logarithm where all values allow it."""
        y = np.array(self.values)
        if self.positive and value > 0:
            return logarithm(y), math.log(value), self._floor
        return y, value, self._floor * float(np.max(np.abs(y)))

    def _flat(self, y: Float64) -> tuple[Float64, float]:
        """Values without their trend, and what is expected next."""
        n = len(y)
        half = n // 2
        early, late = float(np.median(y[:half])), float(np.median(y[half:]))
        slope = (late - early) / (n - half)
        around = y - slope * np.arange(n)
        return around, float(np.median(around)) + slope * n


def _deviations(distance: float, sigma: float) -> float:
    return distance / sigma if sigma > 0 else math.copysign(math.inf, distance)


def others_median(values: Float64) -> Float64:
    """For each value the median of the other ranks' at the same step.

    Args:
        values: float64 [N, R]; NaN where a rank is missing.

    Returns:
        float64 [N, R]; NaN where a rank is missing or alone.
    """
    ordered = np.sort(values, axis=1)  # NaN last
    others = np.isfinite(values).sum(axis=1) - 1
    rows, last = np.arange(len(values)), values.shape[1] - 1

    def without_itself(index: Int64) -> Float64:
        # What stands at an index once the value itself has been taken out: what stood there
        # before, or the next one where the value stood there or before.
        here, after = ordered[rows, index], ordered[rows, np.minimum(index + 1, last)]
        return np.where(values <= here[:, None], after[:, None], here[:, None])

    low, high = np.maximum(others - 1, 0) // 2, np.maximum(others, 0) // 2
    median = 0.5 * (without_itself(low) + without_itself(high))
    return np.where(np.isfinite(values) & (others > 0)[:, None], median, np.nan)
