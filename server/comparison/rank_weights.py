"""What each rank's gradient counts in what came out of a reduction, by sketches alone. Pure.

Sketches are linear, so that sketch(reduced) = sum over ranks of w_r sketch(local_r), up to
rounding: one equation a tensor and bucket, one unknown a rank. In a mean all w_r are 1/N; in a
mean over tokens they are the ranks' shares of them. Other weights name what happened to a rank: 0
where it was lost, 2/N where it was counted twice.

The general solution is costly for many ranks, and there is none where there are more ranks than
equations. So ranks are first taken up one by one beside an expected mean, each time the one that
explains most of what is left (orthogonal least squares, Chen, Billings and Luo 1989); all weights
at once come after, or those of groups of neighbouring ranks, as nodes are. Where not all tensors
have the same weights, those are taken that hold for most (consensus of samples, Fischler and
Bolles 1981).

The noise is the reduction's rounding, 2e-8 of a gradient in float32, 2e-3 in bfloat16; a weight's
standard error is that of least squares on what is left.

Shapes: R ranks of one replica class, T tensors, K buckets; M equations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from rankscope.server.window import Bool, Float64, Int64

# Weights within half a per cent are one weight: one sample in a batch of 200 does as much.
SAME = 0.005
# Standard errors that a weight, or what a rank explains of what is left, has to exceed. Of 1,024
# ranks at a million sampled steps, one exceeds 6.1 by chance; rounding has heavier tails.
SIGMAS = 7.0
# Below this share of what is allowed of a mean nothing is looked for, since it is rounding: in
# float32, 1e-6 of what went in. A sum of 1,024 ranks is rounded 10 times (a tree) or 1,024 times (a
# ring; roots add up), each time by some 2^-25.
ROUNDING = 0.01
# A weight with a larger standard error than this share of 1/N is not known: that of a gradient of
# zeros, or of two that are the same.
_KNOWN = 0.1
# Equations for each unknown: with none to spare everything is explained.
_SPARE = 2
# Equations that are used for each where there are more.
_ENOUGH = 8
# Ranks that are solved for together, and those that are taken up one by one. The work grows with
# the third power of the first and in proportion to the second.
_MAX_SOLVED = 256
_MAX_ODD = 16
# Sets of tensors that are asked for their weights where not all have the same, and equations of the
# smallest.
_MAX_SETS = 6
_FEW = 16
# Fitted weights leave some times more than what is allowed of a mean: they were rounded, too.
LOOSE = 10.0
# Of a rank's deviation, what one half of the tensors may differ from the other by.
_ALIKE = 0.2
# Share of the norm that is left from which on a rank is tried that few equations speak for.
_SHARE = 0.5
# What weights that are not as simple leave of what the simpler ones do.
_MUCH_LESS = 0.5
# Singular values that are zero, relative, since float64 has half as many digits of squares; and the
# rounding of sketches themselves.
_SINGULAR = 1e-6
_EXACT = 1e-9

_Method = Callable[[Float64, Float64], "tuple[Float64, Float64]"]


@dataclass(frozen=True, slots=True)
class Fit:
    """Weights that tensors have in common.

    Attributes:
        weights: float64 [R].
        errors: float64 [R], standard errors; infinite for what cannot be known.
        holds: bool [T], the tensors that have them.
    """

    weights: Float64
    errors: Float64
    holds: Bool


@dataclass(frozen=True, slots=True)
class Meaning:
    """What weights say.

    Attributes:
        how: `mean`: all ranks count as they should, times `factor`; `ranks`: all but `odd` do;
            `own`: they have weights of their own.
        factor: times what they should count those that agree do; NaN for `own`.
        by: the counts that they count by; empty for equal weights.
        odd: row -> times what it should count beside the others; infinite where that is nothing.
    """

    how: str
    factor: float = float("nan")
    by: str = ""
    odd: Mapping[int, float] = field(default_factory=dict)


def expected(ranks: int, counts: Mapping[str, Float64]) -> dict[str, Float64]:
    """Weights that a healthy reduction may have, by what ranks count by.

    Args:
        counts: name -> float64 [R], what each rank's gradient is the mean of; counts that are not
            known of all ranks, or are the same, make no other weights than 1/N.
    """
    found = {"": np.full(ranks, 1.0 / ranks)}
    for name, given in counts.items():
        known = len(given) == ranks and bool((np.isfinite(given) & (given >= 0)).all())
        if known and given.max() - given.min() > SAME * given.mean() > 0:
            found[name] = given / given.sum()
    return found


def combined(weights: Float64, local: Float64) -> Float64:
    """The sum, [T, K], of the ranks' sketches, [R, T, K], with weights, [R]."""
    made: Float64 = np.tensordot(weights, local, axes=1)
    return made


def fitted(
    local: Float64, reduced: Float64, allowed: Float64, bases: Sequence[Float64]
) -> Fit | None:
    """The weights that most tensors have in common; None where none holds for any.

    Args:
        local: float64 [R, T, K].
        reduced: float64 [T, K].
        allowed: float64 [T], distance from a mean that rounding explains; positive.
        bases: float64 [R] each, weights that are expected.
    """
    local, reduced = local / allowed[:, None], reduced / allowed[:, None]
    size = np.sqrt((reduced**2).sum(axis=1))
    best: tuple[_Method, Bool] | None = None
    most, least = 0, np.inf
    for of in _sets(local):
        for method in _methods(local[:, of], bases):
            weights, _ = method(*_equations(local, reduced, of))
            left = np.sqrt(((reduced - combined(weights, local)) ** 2).sum(axis=1))
            # Of a tensor that is nothing, or rounding, every weight holds.
            holds = (left <= LOOSE) & (size > LOOSE)
            count, rest = int(holds.sum()), _norm(left[holds])
            # What is not as simple has to leave much less.
            if count > most or (count == most and rest < _MUCH_LESS * least):
                best, most, least = (method, holds), count, rest
        if 2 * most > len(reduced):
            break
    if best is None:
        return None
    method, holds = best
    weights, errors = method(*_equations(local, reduced, np.flatnonzero(holds)))
    return Fit(weights, errors, holds)


def deviating(local: Float64, reduced: Float64, allowed: Float64, base: Float64) -> Fit | None:
    """Weights of single ranks that differ from what is expected, however little; None for none.

    What changes gradients in other ways (a limit of their values, say) may resemble some rank's by
    chance: a weight has to be the same in one half of the tensors and in the other.

    Args:
        local: float64 [R, T, K].
        reduced: float64 [T, K].
        allowed: float64 [T], as of `fitted`.
        base: float64 [R], the weights that are expected.
    """
    local, reduced = local / allowed[:, None], reduced / allowed[:, None]
    everything = np.arange(len(reduced))
    basis, target = _equations(local, reduced, everything)
    odd = _pursued(basis, target, base)
    if not odd:
        return None
    weights, errors = _with_odd(basis, target, base, odd)
    if len(everything) > 1:
        parts = [
            _with_odd(*_equations(local, reduced, everything[begin::2]), base, odd)
            for begin in (0, 1)
        ]
        (one, its), (other, others) = parts
        difference = np.abs(one - other)
        allowed = np.maximum(_ALIKE * np.abs(weights - base), SIGMAS * np.hypot(its, others))
        if not bool((difference <= allowed)[odd].all()):
            return None
    return Fit(weights, errors, np.ones(len(reduced), dtype=bool))


def meaning(weights: Float64, errors: Float64, bases: Mapping[str, Float64]) -> Meaning:
    """What weights say; those of the expected ones that most ranks agree with, are meant.

    Of two halves of the ranks that differ, the one that counts what it should is the one that
    agrees, or the one that counts at all.

    Args:
        weights: float64 [R], freed of clipping and loss scales.
        errors: float64 [R], their standard errors.
        bases: the weights that are expected, by what ranks count by (`expected`).
    """
    known = errors <= _KNOWN / len(weights)
    best: tuple[int, bool, Meaning] | None = None
    for name, base in bases.items():
        counted = known & (base > 0)
        if not counted.any():
            continue
        times = weights[counted] / base[counted]
        blur = SIGMAS * errors[counted] / base[counted]
        factor, agrees = _agreed(times, blur)
        rows = np.flatnonzero(counted)
        odd = {
            int(row): float(t / factor) if factor else np.inf
            for row, t in zip(rows[~agrees], times[~agrees], strict=True)
        }
        nothing = known & (base <= 0)
        wrong = np.abs(weights[nothing]) > np.maximum(
            SAME * abs(factor) / len(weights), SIGMAS * errors[nothing]
        )
        odd |= {int(row): np.inf for row in np.flatnonzero(nothing)[wrong]}
        # Of explanations for as many ranks, one with no factor; then equal weights, the simplest.
        merit = int(known.sum()) - len(odd), abs(factor - 1.0) <= SAME
        if best is None or merit > best[:2]:
            best = (*merit, Meaning("ranks" if odd else "mean", factor, name, odd))
    if best is None:
        return Meaning("own")
    count, usual, found = best
    if 2 * count > known.sum():
        return found
    lost = all(abs(times) <= SAME for times in found.odd.values())
    usual = lost or usual
    return found if 2 * count == known.sum() and usual else Meaning("own")


def solve(basis: Float64, target: Float64) -> tuple[Float64, Float64]:
    """Coefficients, [N], of vectors, [N, M], by least squares, and their standard errors.

    Those of vectors that are zero, or a sum of others, have an infinite one.
    """
    norms = np.sqrt((basis**2).sum(axis=1))
    there = norms > 0
    # All of one length, so that a rank of small gradients is known as well as the others.
    scaled = basis / np.where(there, norms, 1.0)[:, None]
    values, vectors = np.linalg.eigh(scaled @ scaled.T)
    sound = values > _SINGULAR**2 * max(float(values[-1]), 1.0)
    inverse = np.where(sound, 1.0 / np.where(sound, values, 1.0), 0.0)
    solved = np.zeros(len(basis))
    left = target
    # Squares cost half of the digits; what is left, solved once more, brings them back.
    for _ in range(3):
        solved = solved + vectors @ (inverse * (vectors.T @ (scaled @ left)))
        left = target - solved @ scaled
    spread = (vectors**2) @ inverse
    spread[~there | ((vectors**2) @ (~sound).astype(float) > _SINGULAR)] = np.inf
    errors = _noise(left, target, len(basis)) * np.sqrt(spread) / np.where(there, norms, 1.0)
    return solved / np.where(there, norms, 1.0), errors


def _noise(left: Float64, target: Float64, unknown: int) -> float:
    """Standard deviation of an equation; that of float64 sketches at least."""
    free = max(len(target) - unknown, 1)
    least = _EXACT**2 * float((target**2).sum()) / max(len(target), 1)
    return float(np.sqrt(max(float((left**2).sum()) / free, least, 1e-300)))


def _pursued(basis: Float64, target: Float64, base: Float64) -> list[int]:
    """Ranks that count something else than the base, in the order of what they explain."""
    odd: list[int] = []
    mean = (base @ basis)[None]
    lengths = np.sqrt((basis**2).sum(axis=1))
    # What of the ranks, and of the target, no sum of those before makes up.
    rest, left = basis, target
    newest = mean[0]
    while True:
        direction = newest / max(_norm(newest), 1e-300)
        rest = rest - np.outer(rest @ direction, direction)
        left = left - (left @ direction) * direction
        if len(odd) >= min(_MAX_ODD, len(basis) - 1, len(target) // (2 * _SPARE)):
            break
        norms = np.sqrt((rest**2).sum(axis=1))
        norms[norms <= _SINGULAR * lengths] = np.inf
        explains = np.abs(rest @ left) / norms
        explains[odd] = 0.0
        row = int(np.argmax(explains))
        least = SIGMAS * _noise(left, target, len(odd) + 1)
        # Where equations are few, what other odd ranks do hides that it is no chance.
        if explains[row] <= min(least, max(_SHARE * _norm(left), _EXACT * _norm(target))):
            break
        odd.append(row)
        newest = rest[row]
    while odd:
        found, errors = solve(np.concatenate([mean, basis[odd]]), target)
        certain = np.abs(found[1:]) / errors[1:]
        weakest = int(np.argmin(certain))
        if certain[weakest] > SIGMAS:
            break
        del odd[weakest]
    return odd


def _with_odd(
    basis: Float64, target: Float64, base: Float64, odd: Sequence[int]
) -> tuple[Float64, Float64]:
    """Weights and their errors, where all but some ranks count what they do in the base."""
    rows = list(odd)
    rest = base.copy()
    rest[rows] = 0.0
    found, errors = solve(np.concatenate([(rest @ basis)[None], basis[rows]]), target)
    weights, spread = found[0] * rest, np.zeros_like(rest)
    # The error is infinite where the others' gradients cancel.
    spread[rest != 0] = errors[0] * rest[rest != 0]
    weights[rows], spread[rows] = found[1:], errors[1:]
    return weights, spread


def _norm(vector: Float64) -> float:
    return float(np.sqrt((vector**2).sum()))


def _one_by_one(base: Float64, basis: Float64, target: Float64) -> tuple[Float64, Float64]:
    return _with_odd(basis, target, base, _pursued(basis, target, base))


def _in_groups(size: int, basis: Float64, target: Float64) -> tuple[Float64, Float64]:
    """Weights and their errors, where this many consecutive ranks have the same."""
    first = np.arange(0, len(basis), size)
    found = solve(np.add.reduceat(basis, first), target)
    weights, errors = (np.repeat(each, size)[: len(basis)] for each in found)
    return weights, errors


def _methods(local: Float64, bases: Sequence[Float64]) -> Iterator[_Method]:
    """Ways to weights, the simplest first, as far as there are equations for them."""
    for base in bases:
        yield partial(_one_by_one, base)
    most = min(_MAX_SOLVED, int((np.abs(local).max(axis=0) > 0).sum()) // _SPARE)
    if len(local) <= most:
        yield solve
    elif most > 1:
        yield partial(_in_groups, 1 << math.ceil(math.log2(len(local) / most)))


def _equations(local: Float64, reduced: Float64, of: Int64) -> tuple[Float64, Float64]:
    """Vectors, [R, M], and what they add up to, [M], of some tensors; not of empty buckets."""
    basis, target = local[:, of].reshape(len(local), -1), reduced[of].reshape(-1)
    used = np.flatnonzero((target != 0) | (np.abs(basis).max(axis=0) > 0))
    most = _ENOUGH * max(len(local), 64)
    if len(used) > most:
        # Evenly, so that all tensors are in it.
        used = used[np.linspace(0, len(used) - 1, most).astype(np.int64)]
    return basis[:, used], target[used]


def _sets(local: Float64) -> Iterator[Int64]:
    """Sets of tensors that may have weights in common: all, then as few as can be solved."""
    tensors = local.shape[1]
    yield np.arange(tensors)
    if tensors == 1:
        return
    equations = (np.abs(local).max(axis=0) > 0).sum(axis=1)
    largest = np.argsort(-equations, kind="stable")
    # Few ranks that are odd need few equations, all of them need more.
    all_ranks = _SPARE * min(len(local), _MAX_SOLVED)
    for needed in sorted({_FEW, max(_FEW, all_ranks)}):
        held: list[int] = []
        made = 0
        for row in largest.tolist():
            held.append(row)
            if equations[held].sum() >= needed:
                yield np.array(held, dtype=np.int64)
                held, made = [], made + 1
                if made == _MAX_SETS:
                    break


def _agreed(times: Float64, blur: Float64) -> tuple[float, Bool]:
    """The number that most of some have in common; of equally many the one next to 1."""
    order = np.argsort(times, kind="stable")
    within = np.abs(times[None] - times[order, None]) <= np.maximum(
        SAME * np.abs(times[order, None]), blur[None] + blur[order, None]
    )
    votes = within.sum(axis=1)
    nearest = np.abs(times[order] - 1.0)
    # What counts nothing is the one that is lost.
    nearest[np.abs(times[order]) <= SAME] = np.inf
    best = int(np.lexsort((nearest, -votes))[0])
    agrees: Bool = within[best]
    precise = 1.0 / np.maximum(blur[agrees], 1e-300) ** 2
    return float((precise * times[agrees]).sum() / precise.sum()), agrees
