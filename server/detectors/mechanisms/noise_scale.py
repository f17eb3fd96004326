"""The gradient noise scale, out of the norms of gradients before and after their reduction.

McCandlish, Kaplan, Amodei et al. (2018), An Empirical Model of Large-Batch Training, appendix A.1:
the simple noise scale tr(Sigma) / |G|^2 is the batch, in samples, whose gradient is as much signal
as noise. The squared norm of a gradient over B samples is |G|^2 + tr(Sigma) / B on average, and the
R ranks' own gradients are over b each, B = R b, which makes two equations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from rankscope.agent.wire import Float64, Int64

Value = TypeVar("Value", float, Float64)

# A squared norm of the mean of R gradients lies between 1/R and 1 times the mean of their own.
BELOW = 0.5
ABOVE = 0.999
# By what share the norms of one reduced gradient may differ between ranks: it is the same bits on
# all of them, and only the order in which a device sums their squares is its own.
SAME = 1e-3
# Weight that moving means keep from one step to the next: they remember some 50 steps.
KEEP = 0.98
_FEWEST = 50


def estimates(small: Value, big: Value, *, ranks: int, part: Value) -> tuple[Value, Value]:
    """|G|^2 and tr(Sigma), unbiased; single steps scatter widely, below 0 too.

    Args:
        small: mean of the squared norms of the ranks' own gradients.
        big: squared norm of the gradient after the reduction.
        ranks: R, 2 or more.
        part: b, samples of one rank.
    """
    signal = (ranks * big - small) / (ranks - 1)
    noise = part * (small - big) / (1.0 - 1.0 / ranks)
    return signal, noise


def of_a_mean(share: Value, ranks: int) -> bool | np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Whether big/small can be of the mean of R gradients in which there is noise."""
    return (share > BELOW / ranks) & (share < ABOVE)


@dataclass(frozen=True, slots=True)
class NoiseCurve:
    """The noise scale over the steps, and the batch beside it.

    Attributes:
        steps: int64 [S], ascending.
        scale: float64 [S], samples; infinite where no signal is left, NaN where the norms cannot be
            of a mean and its parts.
        batch: float64 [S], samples of all ranks.
        counted: whether samples are reported; else the batch of a rank counts as one.
    """

    steps: Int64
    scale: Float64
    batch: Float64
    counted: bool


def moving(
    steps: Int64, small: Float64, big: Float64, part: Float64, *, ranks: int, counted: bool
) -> NoiseCurve | None:
    """The noise scale of moving means, from the 50th step on; None where there are fewer.

    Args:
        steps: int64 [S] with the norms of all ranks.
        small, big, part: float64 [S] each, finite, as of `estimates`.
    """
    if len(steps) < _FEWEST:
        return None
    signal, noise = estimates(small, big, ranks=ranks, part=part)
    signal, noise, small, big = (_mean(values) for values in (signal, noise, small, big))
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = np.where(signal > 0, noise / signal, np.inf)
        scale[~of_a_mean(big / small, ranks)] = np.nan
    known = slice(_FEWEST - 1, None)
    return NoiseCurve(steps[known], scale[known], (ranks * part)[known], counted)


def _mean(values: Float64) -> Float64:
    """Moving means [S]: sums of weight (1 - KEEP) KEEP^age, not divided by it: ratios need not."""
    made = np.empty_like(values)
    sum_so_far = 0.0
    for place, value in enumerate(values.tolist()):
        sum_so_far = KEEP * sum_so_far + (1 - KEEP) * value
        made[place] = sum_so_far
    return made
