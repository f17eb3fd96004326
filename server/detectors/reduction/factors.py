"""What the factor of a reduced gradient, or the ranks' weights in it, say."""

from __future__ import annotations

import math

import numpy as np

from rankscope.server.comparison import rank_weights as weighing
from rankscope.server.comparison.conservation import COUNTS
from rankscope.server.comparison.rank_weights import Meaning
from rankscope.server.detectors.reduction.explain import Divisor
from rankscope.server.window import Float64, Reduction, Window

# A power of two from here on, or one over it, is a loss scale that is taken out by hand: it changes
# no digit of a gradient, and none of the divisors that get mixed up is as large.
_LOSS_SCALE = 64.0


def meaning_of(made: Reduction, expected: float, counts: dict[str, Float64]) -> Meaning:
    """What the ranks' weights say, freed of clipping and loss scale."""
    if made.pattern != "weights":
        return Meaning("mean", made.ratio / expected, made.weighted_by)
    weights, errors = np.array(made.weights), np.array(made.weight_errors)
    bases = weighing.expected(len(weights), counts)
    return weighing.meaning(weights / expected, errors / expected, bases)


def is_right_elsewhere(made: Reduction, factor: float, exact: float) -> bool:
    """Whether tensors without the factor of most are the mean itself."""
    return bool(made.common) and any(
        t.how == "factor" and is_near(factor * t.factor, 1.0, exact) for t in made.wrong
    )


def divisor_of(factor: float, size: int, world: int, micro: int, exact: float) -> Divisor:
    """By what it looks as if a sum had been divided."""
    by = size / factor
    if micro > 1 and is_near(factor, micro, exact):
        return Divisor(micro, f"the {micro} micro-batches of a step counted as steps", known=True)
    if world != size and is_near(by, world, exact):
        return Divisor(world, f"the {world} ranks of the job", known=True)
    for near in (size - 1, size + 1):
        if near > 1 and is_near(by, near, exact):
            return Divisor(near, f"{near}, one {'less' if near < size else 'more'}", known=True)
    whole = round(by)
    if 1 < whole <= size * size and is_near(by, whole, exact):
        return Divisor(whole, f"{whole}")
    return Divisor()


def is_loss_scale(factor: float, exact: float) -> bool:
    """Whether it looks like a loss scale that was taken out by hand."""
    if 1 / _LOSS_SCALE < factor < _LOSS_SCALE or factor <= 0:
        return False
    return is_near(factor, 2.0 ** round(math.log2(factor)), exact)


def counts_of(window: Window, made: Reduction) -> dict[str, Float64]:
    """What ranks' gradients may be means of, as far as all say it."""
    found = {}
    for name in COUNTS:
        series = window.series.get(name)
        if series is not None:
            column = int(np.searchsorted(window.steps, made.step))
            rows = np.flatnonzero(np.isin(window.ranks, made.ranks) & series.present[:, column])
            if len(rows) == len(made.ranks):
                found[name] = series.values[rows, column]
    return found


def is_near(value: float, other: float, exact: float) -> bool:
    """Whether a number is another one, up to a relative difference of `exact`."""
    return abs(value / other - 1.0) < exact


def is_by_ranks(factor: float, size: int, exact: float) -> bool:
    """Whether it is the number of ranks, or one over it."""
    return is_near(factor, size, exact) or is_near(factor, 1.0 / size, exact)
