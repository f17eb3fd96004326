"""How the inputs are distributed, as far as a few numbers say it. Pure.

What agents report (`rankscope.agent.probes.data.moments`) are of real numbers the means of four
projections of a sample, of their squares, and of the product of each with the next; of tokens mean
signs of hashes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.window import Bool, Float64, Int64, Window

# Series, and how many numbers each has: four projections, their squares, and their products.
NUMBERS, TOKENS = "input_moments", "token_moments"
MOMENTS = 12
SERIES = tuple(f"{name}/{n}" for name in (NUMBERS, TOKENS) for n in range(MOMENTS))
# Distance of two means, in standard deviations of single samples, from which on two kinds of data
# are no longer the same thing. Halves of one data set lie within 0.15, classes or sources apart at
# 0.1 to 0.7; digits that are mirrored at 0.45, shifted by a pixel at 1, transposed at 3, columns in
# another order at 0.5 to 1.2.
_FAR = 0.4
# The same of tokens, in mean signs: texts by different authors lie within 0.13, another
# vocabulary at 0.3 to 0.6.
_FAR_TOKENS = 0.2
# Relative rounding of a mean of float32, below which nothing differs.
_ROUNDING = 1e-5
# Of the twelve, those that come first.
_PROJECTIONS = 4


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches of some ranks at a step.

    Attributes:
        moments: float64 [R, 12], finite.
        samples: in the batch of a rank.
    """

    step: int
    moments: Float64
    samples: float


def batches(window: Window, series: str, members: tuple[int, ...]) -> Iterator[Batches]:
    """Those of a window, where all members report them, of samples of the same size."""
    rows = [rank_rows(window, f"{series}/{n}") for n in range(MOMENTS)]
    steps = rows[0][0]
    here = np.isin(window.ranks, members)
    if not len(steps) or here.sum() != len(members) or any(len(at) != len(steps) for at, _ in rows):
        return
    values = np.stack([row[:, here] for _, row in rows], axis=2)
    samples = _at(window, "samples", steps, here)
    elements = _at(window, "sample_elements", steps, here)
    for n in np.flatnonzero(np.isfinite(values).all(axis=(1, 2))).tolist():
        size = elements[n]
        if series == NUMBERS and np.isfinite(size).any() and size.min() != size.max():
            continue  # sequences of another length: other elements are looked at
        count = float(np.nanmedian(samples[n])) if np.isfinite(samples[n]).any() else math.nan
        yield Batches(int(steps[n]), values[n], max(count, 1.0) if math.isfinite(count) else 1.0)


def far(series: str) -> float:
    """From which distance on two kinds of data are no longer the same thing."""
    return _FAR_TOKENS if series == TOKENS else _FAR


def scatter(series: str, values: Float64, samples: float) -> Float64:
    """Standard deviation of single samples, of each moment; float64 [12].

    Of projections it follows from their mean squares; what squares and products scatter by is at
    least what normal ones would, and more where batches show it.

    Args:
        values: moments of batches, float64 [N, R, 12].
        samples: in each of these batches.
    """
    if series == TOKENS:
        return np.ones(MOMENTS)
    means = np.median(values.mean(axis=0), axis=0)
    projections, squares = means[:_PROJECTIONS], means[_PROJECTIONS : 2 * _PROJECTIONS]
    variances = np.maximum(squares - projections**2, 0.0)
    deviations = np.sqrt(variances)
    normal = np.concatenate(
        (deviations, math.sqrt(2) * variances, deviations * np.roll(deviations, 1))
    )
    seen = np.median(values.std(axis=0), axis=0) * math.sqrt(samples)
    seen[:_PROJECTIONS] = 0.0
    least: Float64 = np.maximum(np.maximum(normal, seen), _ROUNDING * np.abs(means) + 1e-30)
    return least


def _at(window: Window, metric: str, steps: Int64, here: Bool) -> Float64:
    """A metric of some ranks at some steps, float64 [N, R]; NaN where it is not known."""
    known, rows = rank_rows(window, metric)
    found = np.full((len(steps), int(here.sum())), math.nan)
    both, mine, theirs = np.intersect1d(steps, known, return_indices=True)
    if len(both):
        found[mine] = rows[theirs][:, here]
    return found
