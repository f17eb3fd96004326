"""Whether a reduced gradient is the mean of what went into it, by sketches alone.

Sketches are linear and drawn alike on every rank and for every tensor of one shape, so that
sketch(mean) = mean(sketches), up to the rounding of the reduction. What is not so is explained by
what it would have to be instead: another factor, other weights of the ranks (`weights`), another
tensor, another step. A mean over all tokens or samples, where ranks count by how many they have,
is as good as one over ranks.
Pure; the gradient's own scale (clipping, loss scales) is left in `ratio` for the caller to judge.

Shapes: R ranks of one replica class, T tensors, K buckets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rankscope.server.comparison import compression as compressions
from rankscope.server.comparison import rank_weights as weighing
from rankscope.server.comparison.compare import LabelledTable
from rankscope.server.comparison.compression import Compression
from rankscope.server.window import Bool, Float64, Int64, Misreduced, Reduction

# Largest distance of a reduced gradient from the mean, over the mean norm of what went in. Of
# float32 it is 1e-6 with 1,000 ranks; of halves it is their own rounding, added up.
TOLERANCE = 1e-4
HALF_TOLERANCE = 3e-2
_HALF = frozenset(("float16", "bfloat16"))
# Of the ranks' gradients, what is left where they cancel each other: rounding, in float32, of sums
# that may have been added up in any order and of several micro-batches. Nothing says what it is.
_CANCELLED = 1e-6
# What a number may lose for its smallness: below the smallest normal one it has fewer bits, or none
# where a device flushes it to zero. float16 has no such mode, and loses what is between neighbours.
_SMALLEST = {"float64": 2.0**-1022, "float16": 2.0**-24}
_SMALLEST_FLOAT32 = 2.0**-126  # that of bfloat16, too
# Series of what a rank's gradient may be the mean of, those that say more first.
COUNTS = ("tokens", "samples")

# Equations of a tensor are as many as buckets: with more unknowns everything can be explained.
_MAX_UNKNOWN = 24
_MAX_TENSORS = 64
# So many sets of weights are looked for in the tensors that have others than the rest.
_MAX_GROUPS = 4
# A gradient this small beside all of them together moves nothing.
_NEGLIGIBLE = 1e-4
# How exactly a factor is known, relative, and what a rank counts of another tensor.
_SAME = 1e-3
_SAME_PART = 1e-2
# Of a vector's length, from which distance on another one is no nearer to it than nothing is: to
# one of any direction the distance is the length or more.
_NOTHING = 0.5


@dataclass(frozen=True, slots=True)
class Sums:
    """What went into the reduction of one step and what came out of it.

    Attributes:
        mean: float64 [T, K], of the ranks' sketches, by the weights that it should have; NaN rows
            are not known.
        reduced: float64 [T, K].
        local: float64 [R, T, K], each rank's own; None where that is too much to be kept.
    """

    step: int
    mean: Float64
    reduced: Float64
    local: Float64 | None = None


def balance(
    step: int,
    ranks: Int64,
    local: Float64,
    reduced: Float64,
    table: LabelledTable,
    *,
    dtypes: Sequence[str] = (),
    compression: Compression = compressions.NONE,
    before: Sums | None = None,
    counts: Mapping[str, Float64] | None = None,
) -> Reduction:
    """Compares what came out of a reduction with the mean of what went in.

    Args:
        local: float64 [R, T, K].
        reduced: float64 [T, K], on which all ranks agree.
        dtypes: of the tensors; those of 16 bits are known less exactly.
        compression: of what comes out of it as an approximation, only what is another tensor's,
            another step's, or not all ranks' is reported: an approximation never is, to this
            precision.
        before: of the sampled step before.
        counts: name -> float64 [R], tokens or samples of the ranks, as far as they are known.
    """
    sizes = np.sqrt((local**2).sum(axis=2)).mean(axis=0)
    known = np.isfinite(sizes) & np.isfinite(reduced).all(axis=1)
    out = np.sqrt((reduced**2).sum(axis=1))
    half = np.array([d in _HALF or compression.half for d in dtypes] or [False] * len(sizes))
    tolerance = np.where(half, HALF_TOLERANCE, TOLERANCE)
    elements = [math.prod(shape) for shape in table.shapes]
    bases = weighing.expected(len(ranks), counts or {})
    means = {by: weighing.combined(base, local) for by, base in bases.items()}
    # What is 0 on both sides (a part of the model that was not used) shows nothing, and neither
    # does what rounding alone would make of it.
    lost = len(ranks) * np.sqrt(elements) * _least(dtypes or [""] * len(sizes))
    strongest = np.max([_norms(mean) for mean in means.values()], axis=0)
    cancelled = np.maximum(strongest, out) <= _CANCELLED * sizes
    reported = known & ~cancelled & (np.maximum(sizes, out) * tolerance > lost)
    tolerance += compression.rounding(sizes, elements, len(ranks))
    lossy = compression.lossy(table.shapes)
    made = Reduction(
        step=step,
        ranks=ranks,
        tensor_count=len(sizes),
        known=int(reported.sum()),
        compressed=int((reported & lossy).sum()),
        unknown=tuple(table.names[i] for i in np.flatnonzero(~known)[:_MAX_TENSORS]),
        before=-1 if before is None else before.step,
    )
    if not (reported & ~lossy).any():
        return made
    if before is not None and before.mean.shape != reduced.shape:
        before = None
    parts = _Parts(ranks, local, reduced, table, sizes, tolerance, reported, lossy, before)
    for by, base in bases.items():
        mean = means[by]
        ratio = parts.common_ratio(mean)
        if ratio is not None:
            made = replace(made, ratio=ratio[0], ratio_error=ratio[1], weighted_by=by)
            return parts.beside(made, ratio[0] * base, ratio[0] * mean)
    return parts.as_a_whole(made, list(bases.values()))


def _least(dtypes: Sequence[str]) -> Float64:
    return np.array([_SMALLEST.get(dtype, _SMALLEST_FLOAT32) for dtype in dtypes])


def _norms(sketches: Float64) -> Float64:
    norms: Float64 = np.sqrt((sketches**2).sum(axis=1))
    return norms


def expected_mean(local: Float64, by: str, counts: Mapping[str, Float64]) -> Float64:
    """The mean, [T, K], of the ranks' sketches, [R, T, K], by what they count by."""
    return weighing.combined(weighing.expected(len(local), counts)[by], local)


def negligible(sketches: Mapping[int, Float64 | None]) -> dict[int, int]:
    """Step -> number of tensors whose gradient is negligible.

    A bias before a normalisation has none but rounding: no step need move it.

    Args:
        sketches: step -> float64 [T, K] of the applied gradient.
    """
    found = {}
    for step, made in sketches.items():
        if made is not None:
            norms = np.sqrt((made**2).sum(axis=1))
            found[step] = int((norms < _NEGLIGIBLE * np.sqrt((norms**2).sum())).sum())
    return found


def _common_ratio(
    mean: Float64, reduced: Float64, sizes: Float64, tolerance: Float64
) -> tuple[float, float] | None:
    """The factor that most tensors have in common, and how far off it may be; None for none.

    One tensor decides nothing where there are more, and neither do fewer than a third of them,
    unless that factor is 1.
    """
    power = (mean**2).sum(axis=1)
    usable = power > (_CANCELLED * sizes) ** 2
    if not usable.any():
        return None
    mean, reduced, sizes = mean[usable], reduced[usable], sizes[usable]
    tolerance, power = tolerance[usable], power[usable]
    ratios = (mean * reduced).sum(axis=1) / power
    off = np.sqrt(((reduced - ratios[:, None] * mean) ** 2).sum(axis=1))
    # One tensor out of proportion to itself has no factor at all.
    sound = (off <= tolerance * np.abs(ratios) * sizes) & (ratios != 0)
    if not sound.any():
        return None
    ratios, precise = ratios[sound], (tolerance * sizes / np.sqrt(power))[sound]
    order = np.argsort(ratios, kind="stable")
    ratios, precise = ratios[order], precise[order]
    width = np.maximum(3 * precise, _SAME) * np.abs(ratios)
    votes = np.searchsorted(ratios, ratios + width, side="right") - np.searchsorted(
        ratios, ratios - width, side="left"
    )
    best = int(np.argmax(votes))
    if votes[best] < max(len(mean) / 3, min(2, len(mean))):
        # Where nothing was scaled at all, one tensor that came through unharmed shows it: by chance
        # none is the mean to this precision.
        plain = np.flatnonzero(np.abs(ratios - 1.0) <= width)
        if not len(plain):
            return None
        best = int(plain[np.argmin(np.abs(ratios[plain] - 1.0))])
    near = np.abs(ratios - ratios[best]) <= width[best]
    weight = 1.0 / precise[near] ** 2
    ratio = float((weight * ratios[near]).sum() / weight.sum())
    # Rounding to few bits may go in one direction throughout.
    return ratio, abs(ratio) * float(precise[near].min())


@dataclass(frozen=True, slots=True)
class _Parts:
    """What went into one step's reduction and what came out, tensor by tensor.

    Attributes:
        sizes: float64 [T], norms of what went in; NaN for what is not known.
        tolerance: float64 [T], what rounding may make of them.
        reported, lossy: bool [T], tensors that show something; those that come out as
            approximations.
    """

    ranks: Int64
    local: Float64
    reduced: Float64
    table: LabelledTable
    sizes: Float64
    tolerance: Float64
    reported: Bool
    lossy: Bool
    before: Sums | None

    def common_ratio(self, mean: Float64) -> tuple[float, float] | None:
        """Times what a mean, [T, K], most tensors are, as of `_common_ratio`."""
        rows = np.flatnonzero(self.reported & ~self.lossy)
        return _common_ratio(mean[rows], self.reduced[rows], self.sizes[rows], self.tolerance[rows])

    def beside(self, made: Reduction, weights: Float64, came: Float64) -> Reduction:
        """With the tensors that have not the weights, [R], that most have, and what they are.

        Args:
            came: float64 [T, K], what comes out with these weights.
        """
        scale = float(np.abs(weights).sum()) * self.sizes
        # What is not finite lies at no distance that is allowed.
        with np.errstate(invalid="ignore", over="ignore"):
            distances = np.sqrt(((self.reduced - came) ** 2).sum(axis=1))
        allowed = self.tolerance * scale
        off = self.reported & ~(distances <= allowed)
        sound = self.reported & ~off & ~self.lossy & (self.sizes > 0)
        if not made.pattern and (distances[sound] > weighing.ROUNDING * allowed[sound]).any():
            made = self._closely(made, sound, allowed, weights)
        wrong: list[Misreduced] = []
        others = self._other_weights(off & ~self.lossy, allowed, weights)
        for row in np.flatnonzero(off).tolist():
            if len(wrong) == _MAX_TENSORS:
                break
            found = self._explained(row, came, allowed, weights, others.get(row))
            # An approximation is none of what is looked for.
            if found.how == "other" and self.lossy[row]:
                off[row] = False
            else:
                wrong.append(found)
        common: tuple[str, ...] = ()
        if any(found.how == "factor" for found in wrong):
            common = tuple(self.table.names[i] for i in np.flatnonzero(sound)[:_MAX_TENSORS])
        return replace(made, wrong_count=int(off.sum()), wrong=tuple(wrong), common=common)

    def _closely(
        self, made: Reduction, sound: Bool, allowed: Float64, weights: Float64
    ) -> Reduction:
        """With the weights of the ranks, where they differ by less than what is allowed."""
        rows = np.flatnonzero(sound)
        fit = weighing.deviating(self.local[:, rows], self.reduced[rows], allowed[rows], weights)
        return made if fit is None else _weighted(made, fit)

    def _other_weights(
        self, off: Bool, allowed: Float64, weights: Float64
    ) -> dict[int, weighing.Fit]:
        """Tensors of which the ranks have other weights, and these."""
        found: dict[int, weighing.Fit] = {}
        off = off & (allowed > 0)
        for _ in range(_MAX_GROUPS):
            rows = np.flatnonzero(off)
            if not len(rows):
                break
            fit = weighing.fitted(self.local[:, rows], self.reduced[rows], allowed[rows], [weights])
            if fit is None:
                break
            found |= dict.fromkeys(rows[fit.holds].tolist(), fit)
            off[rows[fit.holds]] = False
        return found

    def as_a_whole(self, made: Reduction, bases: Sequence[Float64]) -> Reduction:
        """No factor explains it: of what else does the whole gradient consist?"""
        rows = np.flatnonzero(self.reported & ~self.lossy)
        made = replace(made, wrong_count=len(rows), pattern="other")
        target = self.reduced[rows].reshape(-1)
        allowed = weighing.LOOSE * float(self.tolerance[rows].max())
        if self.before is not None:
            mean = weighing.combined(bases[0], self.local[:, rows]).reshape(-1)
            older, oldest = (m[rows].reshape(-1) for m in (self.before.reduced, self.before.mean))
            if self.before.step == made.step - 1:
                both, rest = _fit(np.stack([mean, older]), target)
                # How much each contributes, whatever scale it is in (a loss is scaled, its gradient
                # no longer). What was clipped in between is carried over shorter than it came; a
                # contribution of the size of the rounding is none.
                sizes = both * (_norm(mean), _norm(older))
                least = max(0.01, 2 * allowed) * float(np.abs(sizes).max())
                if rest <= allowed and sizes.min() > least:
                    return replace(made, pattern="accumulated", weights=tuple(both.tolist()))
            for past in (oldest, older):
                once, rest = _fit(past[None], target)
                if rest <= allowed and once[0] > 0:
                    return replace(made, pattern="stale", weights=(float(once[0]),))
        out = np.sqrt((self.reduced[rows] ** 2).sum(axis=1))
        went_in = self.sizes[rows] > 0
        scale = float(np.median(out[went_in] / self.sizes[rows][went_in])) if went_in.any() else 0.0
        if scale == 0:
            return made
        fit = weighing.fitted(
            self.local[:, rows],
            self.reduced[rows],
            self.tolerance[rows] * scale * np.maximum(self.sizes[rows], 1e-300),
            bases,
        )
        if fit is not None and 3 * fit.holds.sum() >= len(rows):
            came = weighing.combined(fit.weights, self.local)
            return self.beside(_weighted(made, fit), fit.weights, came)
        if (late := self._late(rows, bases[0], allowed)) is not None:
            return replace(made, pattern="late", late=int(self.ranks[late]))
        ratio = self._permuted()
        if ratio is not None:
            made = replace(made, pattern="", ratio=ratio)
            return self.beside(made, ratio * bases[0], ratio * self.local.mean(axis=0))
        return made

    def _late(self, rows: Int64, base: Float64, allowed: float) -> int | None:
        """Which of the ranks, by its row, put in what it had at the step before; None for none."""
        if self.before is None or self.before.local is None:
            return None
        old, new = self.before.local, self.local
        if old.shape != new.shape:
            return None
        mean, target = weighing.combined(base, new[:, rows]), self.reduced[rows].reshape(-1)
        for row in range(len(new)):
            came = (mean + base[row] * (old[row, rows] - new[row, rows])).reshape(-1)
            once, rest = _fit(came[None], target)
            if rest <= allowed and once[0] > 0:
                return row
        return None

    def _permuted(self) -> float | None:
        """Times what other tensors' means most tensors are; None where they are not."""
        mean = self.local.mean(axis=0)
        power = (mean**2).sum(axis=1)
        ratios = []
        rows = np.flatnonzero(self.reported & ~self.lossy)
        for row in rows.tolist():
            for other in self._same_shape(row):
                if power[other] > 0:
                    ratio = float((mean[other] * self.reduced[row]).sum() / power[other])
                    allowed = self.tolerance[row] * abs(ratio) * self.sizes[other]
                    if ratio > 0 and _close(self.reduced[row], ratio * mean[other], allowed):
                        ratios.append(ratio)
                        break
        return float(np.median(ratios)) if 2 * len(ratios) > len(rows) else None

    def _same_shape(self, row: int) -> list[int]:
        """Other tensors that show something and that it could be taken for."""
        # An approximation is never another tensor's mean: that would be looked for in vain.
        others = np.flatnonzero(self.reported & ~self.lossy[row]).tolist()
        shapes = self.table.shapes
        return [other for other in others if other != row and shapes[other] == shapes[row]]

    def _explained(
        self,
        row: int,
        came: Float64,
        allowed: Float64,
        weights: Float64,
        other_weights: weighing.Fit | None,
    ) -> Misreduced:
        """What one tensor's reduced gradient is instead of what the others' are.

        Args:
            came: float64 [T, K], what came out if all had the weights of most.
            allowed: float64 [T], distance that is one of rounding.
        """
        target, near = self.reduced[row], float(allowed[row])
        distances = target - came[row]
        size = near / float(self.tolerance[row])
        found = Misreduced(
            name=self.table.names[row],
            shape=self.table.shapes[row],
            relative=_norm(distances) / size if size > 0 else np.inf,
            how="other",
            buckets=int((np.abs(distances) > max(near, 1e-300) / np.sqrt(len(distances))).sum()),
        )
        if not target.any():
            return replace(found, how="nothing")
        power = float((came[row] ** 2).sum())
        factor = float((came[row] * target).sum()) / power if power > 0 else 0.0
        if factor > 0 and _close(target, factor * came[row], near * factor):
            return replace(found, how="factor", factor=factor)
        if self.before is not None:
            scale = float(weights.sum())
            if _close(target, scale * self.before.mean[row], near):
                return replace(found, how="stale")
        same = self._same_shape(row)
        for other in same:
            if _close(target, came[other], near + float(allowed[other])):
                return replace(found, how="swapped", partner=self.table.names[other])
        if other_weights is not None:
            return replace(found, **self._weighed(other_weights, weights))
        for other in same if 2 * len(self.ranks) <= _MAX_UNKNOWN else ():
            both = np.concatenate([self.local[:, row], self.local[:, other]])
            fitted, rest = _fit(both, target)
            from_other = np.abs(fitted[len(self.ranks) :] - weights) < _SAME_PART * np.abs(weights)
            if rest <= weighing.LOOSE * self.tolerance[row] and from_other.any():
                mixed = tuple(int(r) for r in self.ranks[from_other])
                return replace(found, how="swapped", partner=self.table.names[other], ranks=mixed)
        return found

    def _weighed(self, fit: weighing.Fit, weights: Float64) -> dict[str, Any]:
        """What a tensor's own weights say beside those of most."""
        share = float(weights.sum())
        said = weighing.meaning(fit.weights / share, fit.errors / share, {"": weights / share})
        if said.how != "ranks":
            return {"how": "weights"}
        odd = tuple(int(self.ranks[row]) for row in said.odd)
        times = {round(t, 3) for t in said.odd.values()}
        return {
            "how": "ranks",
            "ranks": odd,
            "factor": next(iter(said.odd.values())) if len(times) == 1 else float("nan"),
        }


def _weighted(made: Reduction, fit: weighing.Fit) -> Reduction:
    return replace(
        made,
        pattern="weights",
        weights=tuple(fit.weights.tolist()),
        weight_errors=tuple(fit.errors.tolist()),
    )


def _fit(basis: Float64, target: Float64) -> tuple[Float64, float]:
    """Coefficients, [N], of the vectors [N, M] that make up a target, [M], and what is left.

    The rest is relative to the target.
    """
    fitted, _ = weighing.solve(basis, target)
    whole = _norm(target)
    return fitted, _norm(target - fitted @ basis) / whole if whole > 0 else np.inf


def _close(one: Float64, other: Float64, allowed: float) -> bool:
    """Whether a vector is another one, to what is allowed, and not just as small as that."""
    return _norm(one - other) <= min(allowed, _NOTHING * _norm(one))


def _norm(vector: Float64) -> float:
    return float(np.sqrt((vector**2).sum()))
