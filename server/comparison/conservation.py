"""Whether a reduced gradient is the mean of what went into it, by sketches alone.

Sketches are linear and drawn alike on every rank and for every tensor of one shape, so that
sketch(mean) = mean(sketches), up to the rounding of the reduction. What is not so is explained by
what it would have to be instead: another factor, some of the ranks, another tensor, another step.
Pure; the gradient's own scale (clipping, loss scales) is left in `ratio` for the caller to judge.

Shapes: R ranks of one replica class, T tensors, K buckets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rankscope.server.comparison import compression as compressions
from rankscope.server.comparison.compare import LabelledTable
from rankscope.server.comparison.compression import Compression
from rankscope.server.window import Bool, Float64, Int64, Misreduced, Reduction

# Largest distance of a reduced gradient from the mean, over the mean norm of what went in. Of
# float32 it is 1e-6 with 1,000 ranks; of halves it is their own rounding, added up.
TOLERANCE = 1e-4
HALF_TOLERANCE = 3e-2
_HALF = frozenset(("float16", "bfloat16"))

# Equations of a tensor are as many as buckets: with more unknowns everything can be explained.
_MAX_UNKNOWN = 24
_MAX_TENSORS = 64
# With more ranks than this, which of them were left out is not worked out.
_MAX_FITTED = 128
# A gradient this small beside all of them together moves nothing.
_NEGLIGIBLE = 1e-4
# How exactly a factor or a rank's weight is known, relative.
_SAME = 1e-3


@dataclass(frozen=True, slots=True)
class Sums:
    """What went into the reduction of one step and what came out of it.

    Attributes:
        mean: float64 [T, K], of the ranks' sketches; NaN rows are not known.
        reduced: float64 [T, K].
    """

    step: int
    mean: Float64
    reduced: Float64


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
) -> Reduction:
    """Compares what came out of a reduction with the mean of what went in.

    Args:
        local: float64 [R, T, K].
        reduced: float64 [T, K], on which all ranks agree.
        dtypes: of the tensors; those of 16 bits are known less exactly.
        compression: of what comes out of it as an approximation, only what is another tensor's,
            another step's, or not all ranks' is reported: an approximation never is, to this
            precision.
        before: of the step before, where it was examined.
    """
    mean = local.mean(axis=0)
    sizes = np.sqrt((local**2).sum(axis=2)).mean(axis=0)
    known = np.isfinite(sizes) & np.isfinite(reduced).all(axis=1)
    out = np.sqrt((reduced**2).sum(axis=1))
    # What is 0 on both sides (a part of the model that was not used) shows nothing.
    reported = known & ((sizes > 0) | (out > 0))
    tolerance = np.full(len(sizes), TOLERANCE)
    for row, dtype in enumerate(dtypes):
        if dtype in _HALF or compression.half:
            tolerance[row] = HALF_TOLERANCE
    elements = [math.prod(shape) for shape in table.shapes]
    tolerance += compression.rounding(sizes, elements, len(ranks))
    lossy = compression.lossy(table.shapes)
    made = Reduction(
        step=step,
        ranks=ranks,
        tensor_count=len(sizes),
        known=int(reported.sum()),
        compressed=int((reported & lossy).sum()),
        unknown=tuple(table.names[i] for i in np.flatnonzero(~known)[:_MAX_TENSORS]),
    )
    if not (reported & ~lossy).any():
        return made
    rows = np.flatnonzero(reported & ~lossy)
    ratio = _common_ratio(mean[rows], reduced[rows], sizes[rows], tolerance[rows])
    if ratio is None:
        return _as_a_whole(made, rows, local, reduced, sizes, tolerance, before)
    distances = np.sqrt(((reduced - ratio * mean) ** 2).sum(axis=1))
    scale = abs(ratio) * sizes
    off = reported & ~(distances <= tolerance * scale)
    wrong: list[Misreduced] = []
    for row in np.flatnonzero(off).tolist():
        if len(wrong) == _MAX_TENSORS:
            break
        # An approximation is never another tensor's mean: that would be looked for in vain.
        others = reported & ~lossy[row]
        found = _explained(
            row, ratio, ranks, local, mean, reduced, table, others, tolerance, before
        )
        if found.how == "other" and lossy[row]:
            off[row] = False
        else:
            wrong.append(found)
    return replace(made, ratio=ratio, wrong_count=int(off.sum()), wrong=tuple(wrong))


def cosine(local: Float64, reduced: Float64) -> float:
    """Cosine of what came out to the mean of what went in; NaN where one is zero or unknown.

    Args:
        local: float64 [R, T, K]; a tensor of which a rank's sketch is not known does not count.
        reduced: float64 [T, K].
    """
    mean = local.mean(axis=0)
    known = np.isfinite(mean).all(axis=1) & np.isfinite(reduced).all(axis=1)
    one, other = mean[known], reduced[known]
    size = float(np.sqrt((one**2).sum() * (other**2).sum()))
    return float((one * other).sum()) / size if size > 0 else float("nan")


def kept(local: Float64, reduced: Float64, ratio: float) -> float:
    """Norm of what came out over that of the mean of what went in, without their common factor.

    NaN where one of them is zero or unknown.

    Args:
        local: float64 [R, T, K]; a tensor of which a rank's sketch is not known does not count.
        reduced: float64 [T, K].
        ratio: the factor.
    """
    mean = local.mean(axis=0)
    known = np.isfinite(mean).all(axis=1) & np.isfinite(reduced).all(axis=1)
    before, after = _norm(ratio * mean[known]), _norm(reduced[known])
    return after / before if before > 0 else float("nan")


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
) -> float | None:
    """The factor that most tensors have in common; None where there is none.

    One tensor decides nothing where there are more, and neither do fewer than a third of them,
    unless that factor is 1.
    """
    power = (mean**2).sum(axis=1)
    usable = power > (1e-6 * sizes) ** 2
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
    return float((weight * ratios[near]).sum() / weight.sum())


def _as_a_whole(
    made: Reduction,
    rows: Int64,
    local: Float64,
    reduced: Float64,
    sizes: Float64,
    tolerance: Float64,
    before: Sums | None,
) -> Reduction:
    """No factor explains it: does the whole gradient consist of something else?"""
    shaped = local[:, rows].reshape(len(local), -1)
    target = reduced[rows].reshape(-1)
    allowed = float(tolerance[rows].max())
    weights: tuple[float, ...] = ()
    pattern = "other"
    if before is not None and before.mean.shape == reduced.shape:
        mean = shaped.mean(axis=0)
        older = before.reduced[rows].reshape(-1)
        fitted, rest = _fit(np.stack([mean, older]), target)
        # What was clipped in between is carried over shorter than it came.
        if rest <= 10 * allowed and min(fitted) > 0.01 * max(np.abs(fitted)):
            pattern, weights = "accumulated", (float(fitted[0]), float(fitted[1]))
        else:
            fitted, rest = _fit(before.mean[rows].reshape(1, -1), target)
            if rest <= 10 * allowed and fitted[0] > 0:
                pattern, weights = "stale", (float(fitted[0]),)
    if pattern == "other" and len(local) <= min(_MAX_FITTED, shaped.shape[1] // 2):
        fitted, rest = _fit(shaped, target)
        if rest <= 10 * allowed:
            pattern, weights = "weights", tuple(float(w) for w in fitted)
    return replace(made, wrong_count=len(rows), pattern=pattern, weights=weights)


def _explained(
    row: int,
    ratio: float,
    ranks: Int64,
    local: Float64,
    mean: Float64,
    reduced: Float64,
    table: LabelledTable,
    reported: Bool,
    tolerance: Float64,
    before: Sums | None,
) -> Misreduced:
    """What one tensor's reduced gradient is instead of the mean of what went in."""
    name, shape = table.names[row], table.shapes[row]
    target = reduced[row]
    size = float(np.sqrt((local[:, row] ** 2).sum(axis=1)).mean()) * abs(ratio)
    allowed = float(tolerance[row])
    distances = target - ratio * mean[row]
    distance = float(np.sqrt((distances**2).sum()))
    relative = distance / size if size > 0 else np.inf
    buckets = int((np.abs(distances) > allowed * max(size, 1e-300) / np.sqrt(len(distances))).sum())
    power = float((mean[row] ** 2).sum())

    found = Misreduced(name=name, shape=shape, relative=relative, how="other", buckets=buckets)
    if not target.any():
        return replace(found, how="nothing")
    own = float((mean[row] * target).sum()) / power if power > 0 else 0.0
    if own > 0 and _close(target, own * mean[row], allowed * abs(own / ratio) * size):
        return replace(found, how="factor", factor=own / ratio)
    if before is not None and before.mean.shape == reduced.shape:
        if _close(target, ratio * before.mean[row], allowed * size):
            return replace(found, how="stale")
    same = [
        other
        for other in np.flatnonzero(reported).tolist()
        if other != row and table.shapes[other] == shape
    ]
    for other in same:
        if _close(
            target, ratio * mean[other], allowed * size + allowed * _norm(ratio * mean[other])
        ):
            return replace(found, how="swapped", partner=table.names[other])
    count = len(ranks)
    if count <= _MAX_UNKNOWN:
        fitted, rest = _fit(local[:, row] / count, target)
        if rest <= 10 * allowed:
            lost = [int(r) for r, w in zip(ranks, fitted, strict=True) if abs(w / ratio) < 0.01]
            return replace(found, how="ranks" if lost else "weights", ranks=tuple(lost))
    if 2 * count <= _MAX_UNKNOWN:
        for other in same:
            both = np.concatenate([local[:, row], local[:, other]]) / count
            fitted, rest = _fit(both, target)
            from_other = np.abs(fitted[count:] / ratio - 1) < 0.01
            if rest <= 10 * allowed and from_other.any():
                mixed = tuple(int(r) for r in ranks[from_other])
                return replace(found, how="swapped", partner=table.names[other], ranks=mixed)
    return found


def _fit(basis: Float64, target: Float64) -> tuple[Float64, float]:
    """Coefficients, [N], of the vectors [N, M] that make up a target, [M], and what is left.

    The rest is relative to the target.
    """
    fitted: Float64 = np.asarray(np.linalg.lstsq(basis.T, target, rcond=None)[0], np.float64)
    whole = _norm(target)
    return fitted, _norm(target - fitted @ basis) / whole if whole > 0 else np.inf


def _close(one: Float64, other: Float64, allowed: float) -> bool:
    return _norm(one - other) <= allowed


def _norm(vector: Float64) -> float:
    return float(np.sqrt((vector**2).sum()))
