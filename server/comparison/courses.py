"""One metric of two runs, at equal steps. Shapes: R ranks, S steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rankscope.server.window import Float64, Int64

# Share of the steps by which ranks of one job may end apart.
_APART = 0.1


@dataclass(frozen=True, slots=True)
class Course:
    """A metric of a run: steps int64 [S] and the mean over its ranks, float64 [S]."""

    steps: Int64
    values: Float64


@dataclass(frozen=True, slots=True)
class Apart:
    """How far two courses lie from each other.

    Attributes:
        steps: number of steps at which both have a value, from `first` to `last`.
        at_last: values of both at `last`.
        first_differing: first common step at which the values are not the same; None: nowhere.
        mean_difference: mean of the second's minus the first's, over finite pairs; NaN: none.
        largest: step of the largest absolute difference; None where there is none.
        at_largest: values of both there.
    """

    steps: int
    first: int | None
    last: int | None
    at_last: tuple[float, float] | None
    first_differing: int | None
    mean_difference: float
    largest: int | None
    at_largest: tuple[float, float] | None


def mean_over_ranks(series: Sequence[tuple[Int64, Float64]]) -> Course:
    """The mean over ranks at each step that all of those have which have the most steps.

    A step at which a rank is missing would read as a jump: such steps are left out. A rank that is
    lost on the way is left out altogether: the others go on, and their end is what matters.
    """
    series = [(s, v) for s, v in series if len(s)]
    if not series:
        return Course(np.empty(0, np.int64), np.empty(0))
    first, last = min(int(s[0]) for s, _ in series), max(int(s[-1]) for s, _ in series)
    # Ranks of a job that was killed end some steps apart.
    series = [(s, v) for s, v in series if last - int(s[-1]) <= _APART * (last - first)]
    steps = np.concatenate([s for s, _ in series])
    values = np.concatenate([v for _, v in series])
    unique, inverse, counts = np.unique(steps, return_inverse=True, return_counts=True)
    sums = np.zeros(len(unique))
    with np.errstate(invalid="ignore", over="ignore"):
        np.add.at(sums, inverse, values)
    whole = counts == counts.max()
    return Course(unique[whole], sums[whole] / counts[whole])


def in_buckets(course: Course, width: int) -> Course:
    """The same in buckets of `width` steps that begin at its multiples: the mean of each."""
    if width <= 1 or not len(course.steps):
        return course
    starts, inverse, counts = np.unique(
        course.steps // width * width, return_inverse=True, return_counts=True
    )
    sums = np.zeros(len(starts))
    with np.errstate(invalid="ignore", over="ignore"):
        np.add.at(sums, inverse, course.values)
    return Course(starts, sums / counts)


def compared(one: Course, other: Course) -> Apart:
    """Two courses side by side, at the steps that both have."""
    common, a, b = np.intersect1d(one.steps, other.steps, return_indices=True)
    left, right = one.values[a], other.values[b]
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    differing = np.flatnonzero(~same)
    finite = np.isfinite(left) & np.isfinite(right)
    with np.errstate(invalid="ignore"):
        distance = np.where(finite, np.abs(right - left), -1.0)
    worst = int(np.argmax(distance)) if len(common) and len(differing) else None
    if worst is not None and distance[worst] <= 0:
        worst = None
    return Apart(
        steps=len(common),
        first=int(common[0]) if len(common) else None,
        last=int(common[-1]) if len(common) else None,
        at_last=(float(left[-1]), float(right[-1])) if len(common) else None,
        first_differing=int(common[differing[0]]) if len(differing) else None,
        mean_difference=float((right - left)[finite].mean()) if finite.any() else float("nan"),
        largest=None if worst is None else int(common[worst]),
        at_largest=None if worst is None else (float(left[worst]), float(right[worst])),
    )
