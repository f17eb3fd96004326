"""What ranks applied that do not agree on the reduced gradient: the mean, their own, or neither.

Sketches are linear: where what a rank applied is a multiple of the mean of what all ranks put in,
an all-reduce took place, whatever was done to its result afterwards; where it is a multiple of
what the rank put in itself, none did. Pure.

Shapes: R ranks of one replica class, T tensors, K buckets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from rankscope.server.comparison import compression as compressions
from rankscope.server.comparison import rank_weights as weighing
from rankscope.server.comparison.compare import LabelledTable
from rankscope.server.comparison.compression import Compression
from rankscope.server.comparison.conservation import HALF_TOLERANCE, TOLERANCE
from rankscope.server.window import Applied, Bool, Float64

_HALF = frozenset(("float16", "bfloat16"))
# Factors of two tensors are one within this, as of a reduction (`conservation`).
_SAME = 1e-3
_MAX_TENSORS = 64
# Times the rounding of a reduction by which two gradients differ that can be told apart.
_ALIKE = 10.0
# Share of the largest weight below which a rank's gradient is not in a sum, and by which weights of
# an equal mean differ: those that least squares finds are known to a thousandth or so.
_COUNTS = 0.01
# Of two gradients with a cosine beyond 1 - 5e-7 nothing tells which of them is in a third: float64
# of sketches in float32 leaves no digit.
_DEPENDENT = 1e-6
# Times the smallest of the ranks' distances from the mean, which is what rounding left: those of
# two ranks, of which each may have rounded anew, differ by chance, and sums of few numbers more.
_ROUNDED = 3.0


def applied(
    local: Float64,
    came: Float64,
    table: LabelledTable,
    *,
    dtypes: Sequence[str] = (),
    compression: Compression = compressions.NONE,
    counts: Mapping[str, Float64] | None = None,
    before: Float64 | None = None,
) -> Applied | None:
    """What each rank applied beside what went in; None where nothing shows it.

    Args:
        local: float64 [R, T, K], what the ranks put in.
        came: float64 [R, T, K], what they applied.
        dtypes: of the tensors; those of 16 bits are known less exactly.
        compression: of what travels as an approximation nothing is said.
        counts: name -> float64 [R], tokens or samples of the ranks, as far as they are known.
        before: float64 [T, K], the mean of what went in at the step before, where it is known.
    """
    finite = np.isfinite(local).all(axis=(0, 2)) & np.isfinite(came).all(axis=(0, 2))
    there = (local != 0).any(axis=2).any(axis=0)
    # A number is a multiple of any other.
    wide = np.array([math.prod(shape) > 1 for shape in table.shapes], dtype=bool)
    shows = np.flatnonzero(finite & there & wide & ~compression.lossy(table.shapes))
    if not len(shows):
        return None
    local, came = local[:, shows], came[:, shows]
    half = [bool(dtypes) and dtypes[i] in _HALF or compression.half for i in shows.tolist()]
    tolerance = np.where(half, HALF_TOLERANCE, TOLERANCE)
    sizes = np.sqrt((local**2).sum(axis=2))
    # Where a rank's own gradient is a multiple of the mean (one class of samples on all of them, of
    # which a bias has one and the same), nothing tells which of the two it applied.
    means = np.broadcast_to(local.mean(axis=0), local.shape)
    alike = np.isfinite(_multiples(means, local, sizes.mean(axis=0), _ALIKE * tolerance)[0])
    telling = ~alike.all(axis=0)
    if not telling.any():
        return None
    shows, local, came, alike = (
        shows[telling],
        local[:, telling],
        came[:, telling],
        alike[:, telling],
    )
    tolerance, sizes = tolerance[telling], sizes[:, telling]
    most: tuple[int, Float64, Float64, Float64] | None = None
    for base in weighing.expected(len(local), counts or {}).values():
        mean = np.broadcast_to(weighing.combined(base, local), local.shape)
        factors, rest = _multiples(mean, came, sizes.mean(axis=0), tolerance)
        factors = np.where(alike, np.nan, factors)
        found = int(np.isfinite(factors).sum())
        if most is None or found > most[0]:
            most = found, factors, rest, mean
    assert most is not None
    _, factors, rest, mean = most
    own = np.isfinite(_multiples(local, came, sizes, tolerance)[0])
    if not (np.isfinite(factors) | own | alike).all():
        rounded = _as_rounded(mean, local, came, sizes, tolerance)
        if rounded is not None and (np.isfinite(rounded[0]) | rounded[1] | alike).all():
            factors, own, tolerance = np.where(alike, np.nan, rounded[0]), *rounded[1:]
    averaged = np.isfinite(factors)
    own = own & ~averaged & ~alike
    stale = np.zeros_like(averaged)
    if before is not None and before.shape == (len(table.names), came.shape[2]):
        past = np.broadcast_to(before[shows], local.shape)
        stale = np.isfinite(_multiples(past, came, sizes.mean(axis=0), tolerance)[0])
        stale &= ~averaged & ~own & ~alike
    names = [table.names[i] for i in shows.tolist()]
    unreduced, changed = own.all(axis=0), (~averaged & ~own & ~alike).any(axis=0)
    return Applied(
        tensors=len(shows),
        averaged=tuple(averaged.sum(axis=1).tolist()),
        own=tuple(own.sum(axis=1).tolist()),
        factors=tuple(_common(row, max(_SAME, float(tolerance.max()))) for row in factors),
        unreduced=tuple(names[i] for i in np.flatnonzero(unreduced)[:_MAX_TENSORS]),
        unreduced_count=int(unreduced.sum()),
        changed=tuple(names[i] for i in np.flatnonzero(changed)[:_MAX_TENSORS]),
        rest=tuple(rest.tolist()),
        received=tuple(_has_received(local, of_rank, i) for i, of_rank in enumerate(came)),
        stale=tuple(stale.sum(axis=1).tolist()),
        subsets=_subsets(local, came, sizes, tolerance),
    )


def _subsets(
    local: Float64, came: Float64, sizes: Float64, tolerance: Float64
) -> tuple[tuple[int, ...], ...]:
    """By rank, those of whose gradients, [R, T, K], it applied a multiple of the mean, [R, T, K].

    Least squares over all of them, held against every tensor by itself. Empty where it is that of
    all, of one, or none.
    """
    basis = local.reshape(len(local), -1)
    scale = np.sqrt((basis**2).sum(axis=1))
    if basis.shape[1] < 2 * len(basis) or not (scale > 0).all():
        return ()
    gram = (basis / scale[:, None]) @ (basis / scale[:, None]).T
    if not np.linalg.det(gram) > _DEPENDENT:
        return ()
    # Of each rank, [R, R].
    weights = np.linalg.solve(gram, (basis @ came.reshape(len(came), -1).T) / scale[:, None]).T
    weights = weights / scale
    found = []
    for row, of_rank in zip(weights, came, strict=True):
        rest = np.sqrt(((of_rank - np.tensordot(row, local, 1)) ** 2).sum(axis=1))
        largest = float(np.abs(row).max())
        taken = np.flatnonzero(np.abs(row) > _COUNTS * largest)
        whole = largest > 0 and bool((rest <= tolerance * (np.abs(row) @ sizes)).all())
        equal = np.abs(row[taken] - row[taken[0]]) <= _COUNTS * largest if whole else False
        some = whole and bool(np.all(equal)) and 1 < len(taken) < len(local)
        found.append(tuple(taken.tolist()) if some else ())
    return tuple(found)


def _as_rounded(
    mean: Float64, local: Float64, came: Float64, sizes: Float64, tolerance: Float64
) -> tuple[Float64, Bool, Float64] | None:
    """What each rank applied, if the reduction sent numbers of fewer bits than its tensors have.

    How many bits, a communication hook or loop of the user's own does not say: the rank that came
    nearest to the mean of a tensor shows what rounding made of it. None where no rank applied its
    own gradient or another multiple than the rest: then all were given something beside the mean.

    Returns:
        Factors to the mean, float64 [R, T], NaN for no multiple; whether it is a multiple of the
        rank's own gradient, bool [R, T]; and what rounding may have made of each tensor, [T].
    """
    nearest = _distances(mean, came, sizes.mean(axis=0)).min(axis=0)
    rounding = np.where(nearest * _ROUNDED <= HALF_TOLERANCE, nearest * _ROUNDED, 0.0)
    wide = np.maximum(tolerance, rounding)
    factors, _ = _multiples(mean, came, sizes.mean(axis=0), wide)
    own = np.isfinite(_multiples(local, came, sizes, tolerance)[0]) & ~np.isfinite(factors)
    ratios = factors / np.abs(factors).max(axis=0)
    apart = np.abs(ratios - ratios.max(axis=0)) > wide
    return (factors, own, wide) if own.any() or apart.any() else None


def _distances(base: Float64, came: Float64, sizes: Float64) -> Float64:
    """Of what came out from its nearest multiple of a base, by what `_multiples` allows, [R, T]."""
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = (base * came).sum(axis=2) / (base**2).sum(axis=2)
        off = np.sqrt(((came - factors[:, :, None] * base) ** 2).sum(axis=2))
        made: Float64 = np.nan_to_num(off / (np.abs(factors) * sizes), nan=np.inf, posinf=np.inf)
    return made


def _has_received(local: Float64, came: Float64, row: int) -> bool:
    """Whether the gradients of the other ranks are in what one applied, [T, K].

    Least squares on its own gradient and the mean of the others': in a mean over N ranks the others
    have (N - 1) / N of both weights, without a reduction none. Half of that share is asked for, at
    `SIGMAS` standard errors: what a filter or noise makes of its own is no other rank's.
    """
    others = np.delete(local, row, axis=0).mean(axis=0)
    basis = np.stack([local[row].reshape(-1), others.reshape(-1)])
    target = came.reshape(-1)
    spare = len(target) - len(basis)
    gram = basis @ basis.T
    if spare < len(basis) or not np.linalg.det(gram) > _DEPENDENT * gram[0, 0] * gram[1, 1]:
        return False
    weights = np.linalg.solve(gram, basis @ target)
    rest = target - weights @ basis
    error = math.sqrt(float(rest @ rest) / spare * float(np.linalg.inv(gram)[1, 1]))
    least = 0.5 * (len(local) - 1) / len(local)
    share = float(weights[1]) / float(np.abs(weights).sum()) if weights.any() else 0.0
    return share >= least and float(weights[1]) > weighing.SIGMAS * error


def _multiples(
    base: Float64, came: Float64, sizes: Float64, tolerance: Float64
) -> tuple[Float64, Float64]:
    """Times what they are of a base, [R, T, K], tensors came out; NaN for no multiple, [R, T].

    And what is left beside it, [R], over all tensors, relative to it.
    """
    power = (base**2).sum(axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = (base * came).sum(axis=2) / power
        squares = ((came - factors[:, :, None] * base) ** 2).sum(axis=2)
        sound = np.sqrt(squares) <= tolerance * np.abs(factors) * sizes
        whole = factors**2 * power
        left = np.sqrt(np.nansum(squares, axis=1) / np.nansum(whole, axis=1))
    # A mean that is lost in its own rounding is no multiple of anything.
    usable = (factors != 0) & (power > (1e-6 * sizes) ** 2)
    made: Float64 = np.where(sound & usable, factors, np.nan)
    return made, left


def _common(factors: Float64, same: float) -> float:
    """The factor that all tensors of a rank have which have one; NaN where it is not one.

    Args:
        same: share of it by which rounding makes them differ.
    """
    known = factors[np.isfinite(factors)]
    if not len(known):
        return math.nan
    middle = float(np.median(known))
    return middle if bool((np.abs(known - middle) <= same * abs(middle)).all()) else math.nan
