"""Compares what the members of a replica class hold: who agrees with whom, and how far apart.

Pure and vectorised: nothing here loops over pairs of ranks. Shapes: R ranks, T tensors, K buckets.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rankscope.agent import wire
from rankscope.server.window import Bool, Comparison, Float64, Int64, TensorDifference

UInt64 = npt.NDArray[np.uint64]

# Norms of the same tensors, summed on machines of different kinds, differ by rounding.
NORM_TOLERANCE = 1e-6

# A tensor is a multiple of another if, relative to its size, it is no further from that multiple
# than rounding of float32 goes.
_SAME = 1e-5

# At most this many differing tensors are listed; the count includes the others.
_MAX_TENSORS = 64

# The distance of tensors that differ by less than a sketch can show.
_TINY = float(np.finfo(np.float64).tiny)

# The digest of a tensor that is not finite.
_LOST = np.uint64(0x7FF8_0000_0000_0001)

_FOLD = np.random.Generator(np.random.Philox(key=[0, 7])).integers(
    0, 2**64, size=4096, dtype=np.uint64
) | np.uint64(1)


@dataclass(frozen=True, slots=True)
class LabelledTable:
    """Tensors that fingerprints speak of, [T], each with the name of the table it is from."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    tables: tuple[str, ...]


def pairwise_distances(sketches: Float64) -> Float64:
    """L2 distance of any two ranks.

    Args:
        sketches: float64 [R, T, K].

    Returns:
        float64 [R, R], symmetric, exactly 0 where two ranks' sketches are the same.
    """
    flat = sketches.reshape(len(sketches), -1)
    # Against a common reference: the Gram matrix of the differences does not lose the small
    # distance of two ranks in the large norm of what they hold.
    flat = flat - np.median(flat, axis=0)
    gram = flat @ flat.T
    squares = np.diag(gram)
    distance: Float64 = np.sqrt(np.maximum(squares[:, None] + squares[None, :] - 2 * gram, 0.0))
    # Rounding leaves a remainder where there is no difference at all. The bytes themselves are
    # examined: of two ranks one is the negative of the other here, which sums up to the same
    # digest.
    seen: dict[bytes, int] = {}
    labels = np.array([seen.setdefault(row.tobytes(), len(seen)) for row in flat])
    distance[labels[:, None] == labels[None, :]] = 0.0
    return distance


def fold(digests: UInt64) -> UInt64:
    """One digest a rank, uint64 [R], of its digests, uint64 [R, T]."""
    count = digests.shape[1]
    weights = np.resize(_FOLD, count)
    # Beyond the table the weights repeat: turned by their turn, so that equal weights differ.
    weights = weights + np.uint64(2) * (np.arange(count, dtype=np.uint64) // np.uint64(len(_FOLD)))
    folded: UInt64 = (digests * weights).sum(axis=1, dtype=np.uint64)
    return folded


def labels_of(values: npt.NDArray[np.generic]) -> tuple[Int64, bool]:
    """Clusters of equal values, [R]: 0 is the largest; False where another is as large.

    Among clusters of one size the one with the lowest rank comes first.
    """
    _, first, inverse, counts = np.unique(
        values, return_index=True, return_inverse=True, return_counts=True
    )
    order = np.lexsort((first, -counts))
    labels = np.empty(len(order), dtype=np.int64)
    labels[order] = np.arange(len(order))
    decided = len(order) < 2 or bool(counts[order[0]] > counts[order[1]])
    return labels[inverse], decided


def same_columns(values: npt.NDArray[Any], present: npt.NDArray[np.bool_]) -> Bool:
    """Columns, bool [S], in which all present values, [R, S], are the same; NaN is NaN."""
    columns = np.arange(values.shape[1])
    first = values[np.argmax(present, axis=0), columns]
    same = values == first
    if values.dtype.kind == "f":
        same |= np.isnan(values) & np.isnan(first)
    result: Bool = (same | ~present).all(axis=0)
    return result


def compare_digests(step: int, stage: str, ranks: Int64, values: UInt64) -> Comparison:
    """Model digests, uint64 [R], of one stage at one step."""
    if bool((values == values[0]).all()):
        return agreed(step, stage, ranks)
    labels, decided = labels_of(values)
    unknown = np.where(labels == 0, 0.0, np.nan)
    return Comparison(step, stage, ranks, labels, unknown, unknown, decided)


def agreed(step: int, stage: str, ranks: Int64, tensor_count: int = 0) -> Comparison:
    """A comparison of ranks that all hold the same."""
    zeros = np.zeros(len(ranks))
    return Comparison(
        step,
        stage,
        ranks,
        np.zeros(len(ranks), dtype=np.int64),
        zeros,
        zeros,
        tensor_count=tensor_count,
    )


def merged(parts: Sequence[Comparison]) -> Comparison:
    """One comparison of several replica classes at one step and stage.

    Where some are not equal, it speaks of these alone: each has a reference of its own, and what is
    the same in another class means nothing.

    Args:
        parts: at least one, in the order of the classes.
    """
    differing = [part for part in parts if not part.equal]
    if len(parts) == 1 or len(differing) == 1:
        return (differing or [*parts])[0]
    if not differing:
        everyone = np.sort(np.concatenate([part.ranks for part in parts]))
        tensor_count = max(part.tensor_count for part in parts)
        return agreed(parts[0].step, parts[0].stage, everyone, tensor_count)
    ranks = np.concatenate([part.ranks for part in differing])
    clusters, free = [], 1
    for part in differing:
        clusters.append(np.where(part.clusters > 0, part.clusters + free - 1, 0))
        free += int(part.clusters.max())
    order = np.argsort(ranks, kind="stable")
    tensors: dict[tuple[str, str], TensorDifference] = {}
    for part in differing:
        for tensor in part.tensors:
            known = tensors.get((tensor.table, tensor.name))
            if known is not None:
                worse = max(known, tensor, key=lambda t: np.nan_to_num(t.relative, nan=-1.0))
                everywhere = tuple(sorted({*known.ranks, *tensor.ranks}))
                tensor = replace(worse, ranks=everywhere)
            tensors[tensor.table, tensor.name] = tensor
    return Comparison(
        step=differing[0].step,
        stage=differing[0].stage,
        ranks=ranks[order],
        clusters=np.concatenate(clusters)[order],
        distance=np.concatenate([part.distance for part in differing])[order],
        relative=np.concatenate([part.relative for part in differing])[order],
        decided=all(part.decided for part in differing),
        tensors=tuple(tensors.values()),
        tensor_count=max(part.tensor_count for part in differing),
    )


def compare_fingerprints(
    step: int,
    stage: str,
    ranks: Int64,
    fingerprints: Sequence[wire.Fingerprint],
    table: LabelledTable,
) -> Comparison:
    """Fingerprints tensor by tensor of ranks that hold replicas of the tensors of `table`."""
    fingerprints = [readable(made) for made in fingerprints]
    digests = np.stack([p.digests for p in fingerprints])
    if bool((digests == digests[0]).all()):
        return agreed(step, stage, ranks, digests.shape[1])
    labels, decided = labels_of(fold(digests))
    unknown = np.where(labels == 0, 0.0, np.nan)
    known = Comparison(step, stage, ranks, labels, unknown, unknown, decided)
    return with_fingerprints(known, dict(zip(ranks.tolist(), fingerprints, strict=True)), table)


def readable(made: wire.Fingerprint) -> wire.Fingerprint:
    """A fingerprint whose tensors that hold NaN or infinities all have one digest.

    NaN has many bit patterns, and which of them comes out of a sum depends on its order: two ranks
    whose tensors are lost in this way do not differ in anything that could be known.
    """
    if made.sketches is None:
        return made
    lost = ~np.isfinite(made.sketches).all(axis=1)
    if not lost.any():
        return made
    return replace(made, digests=np.where(lost, _LOST, made.digests))


def joined_table(tables: Mapping[str, wire.TensorTable]) -> LabelledTable:
    """The tensors of several tables, one table after the other."""
    return LabelledTable(
        names=tuple(name for table in tables.values() for name in table.names),
        shapes=tuple(shape for table in tables.values() for shape in table.shapes),
        tables=tuple(name for name, table in tables.items() for _ in table.names),
    )


def with_fingerprints(
    comparison: Comparison, fingerprints: Mapping[int, wire.Fingerprint], table: LabelledTable
) -> Comparison:
    """Adds which tensors differ and how far, where the fingerprints of some ranks report.

    One rank speaks for its cluster: the members of a cluster hold the same bits. A digest decides
    whether a tensor differs and its sketch how far (the order in which another machine sums up a
    sketch changes its last bits). What differs by less than a sketch can show, as 0 from -0, still
    differs: by the smallest number there is.

    Args:
        fingerprints: by rank, all of `table`.
    """
    fingerprints = {rank: readable(made) for rank, made in fingerprints.items()}
    held = [
        fingerprints[rank].digests for rank in comparison.ranks.tolist() if rank in fingerprints
    ]
    all_whole = len(held) == len(comparison.ranks) > 1 and len(held[0]) == len(table.names)
    if all_whole and all(np.array_equal(one, held[0]) for one in held[1:]):
        # These digests are of bits; of values that are not finite they mean nothing.
        return agreed(comparison.step, comparison.stage, comparison.ranks, len(held[0]))
    labels = comparison.clusters
    speakers: dict[int, int] = {}
    for row, (rank, label) in enumerate(
        zip(comparison.ranks.tolist(), labels.tolist(), strict=True)
    ):
        known = speakers.get(label)
        better = known is None or fingerprints[int(comparison.ranks[known])].sketches is None
        if rank in fingerprints and better:
            speakers[label] = row
    count = len(table.names)
    if comparison.equal or 0 not in speakers or len(speakers) < 2:
        shown = count if comparison.equal and len(fingerprints) > 1 else comparison.tensor_count
        return replace(comparison, tensor_count=shown)
    reference = fingerprints[int(comparison.ranks[speakers.pop(0)])]
    norms = _norms(reference.sketches, count)
    clusters = int(labels.max()) + 1
    differs = np.zeros((clusters, count), dtype=bool)
    by_tensor = np.zeros((clusters, count))
    buckets = np.zeros((clusters, count), dtype=np.int64)
    spoken_by = {}
    for label, row in speakers.items():
        spoken = spoken_by[label] = fingerprints[int(comparison.ranks[row])]
        differs[label] = spoken.digests != reference.digests
        by_tensor[label], buckets[label] = _distances(spoken, reference, differs[label])
    distance, relative = comparison.distance.copy(), comparison.relative.copy()
    whole = np.sqrt((by_tensor**2).sum(axis=1))
    # The square of a tiny number is 0.
    whole[differs.any(axis=1)] = np.maximum(whole[differs.any(axis=1)], _TINY)
    spoken_for = np.isin(labels, [label for label in speakers if differs[label].any()])
    distance[spoken_for] = whole[labels[spoken_for]]
    ratio = _ratio(distance, np.sqrt((norms**2).sum()))
    relative[spoken_for] = np.maximum(ratio[spoken_for], _TINY)
    tensors = []
    for index in np.flatnonzero(differs.any(axis=0))[:_MAX_TENSORS]:
        furthest = np.where(differs[:, index], np.nan_to_num(by_tensor[:, index], nan=0.0), -1.0)
        worst = int(np.argmax(furthest))
        tensors.append(
            TensorDifference(
                name=table.names[index],
                shape=table.shapes[index],
                ranks=tuple(int(r) for r in comparison.ranks[differs[labels, index]]),
                distance=float(by_tensor[worst, index]),
                relative=float(np.maximum(_ratio(by_tensor[worst, index], norms[index]), _TINY)),
                buckets=int(buckets[worst, index]),
                table=table.tables[index],
                factor=_factor(spoken_by[worst], reference, int(index)),
                partner=_partner(spoken_by[worst], reference, int(index), table),
            )
        )
    return replace(
        comparison,
        distance=distance,
        relative=relative,
        tensors=tuple(tensors),
        tensor_count=count,
    )


def _norms(sketches: Float64 | None, count: int) -> Float64:
    if sketches is None:
        return np.full(count, np.nan)
    norms: Float64 = np.sqrt((sketches**2).sum(axis=1))
    return norms


def _distances(
    one: wire.Fingerprint, other: wire.Fingerprint, differs: npt.NDArray[np.bool_]
) -> tuple[Float64, Int64]:
    """Distance, [T], and number of buckets that differ, [T]; 0 where the digests are the same."""
    if one.sketches is None or other.sketches is None or one.sketches.shape != other.sketches.shape:
        return np.where(differs, np.nan, 0.0), np.zeros(len(differs), dtype=np.int64)
    distance = np.zeros(len(differs))
    buckets = np.zeros(len(differs), dtype=np.int64)
    with np.errstate(invalid="ignore"):
        gap = one.sketches[differs] - other.sketches[differs]
        distance[differs] = np.maximum(np.sqrt((gap**2).sum(axis=1)), _TINY)
    buckets[differs] = (gap != 0).sum(axis=1)
    return distance, buckets


def _factor(one: wire.Fingerprint, other: wire.Fingerprint, index: int) -> float:
    """What a tensor of `other` is multiplied by to give that of `one`; NaN where it is none."""
    if one.sketches is None or other.sketches is None or one.sketches.shape != other.sketches.shape:
        return math.nan
    own, reference = one.sketches[index], other.sketches[index]
    square = float(reference @ reference)
    if not 0 < square < math.inf or not np.isfinite(own).all():
        return math.nan
    # Sketches are linear: that of a multiple is the multiple of the sketch.
    factor = float(own @ reference) / square
    rest = own - factor * reference
    return factor if float(rest @ rest) <= _SAME**2 * square else math.nan


def _partner(
    one: wire.Fingerprint, other: wire.Fingerprint, index: int, table: LabelledTable
) -> str:
    """The tensor of `other` that `one` has in place of another one of the same shape."""
    for found in np.flatnonzero(other.digests == one.digests[index]).tolist():
        same = table.shapes[found] == table.shapes[index]
        if found != index and same and table.tables[found] == table.tables[index]:
            return table.names[found]
    return ""


def _ratio(value: npt.ArrayLike, norm: npt.ArrayLike) -> Float64:
    """`value / norm`, infinite where something differs from nothing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.asarray(value, dtype=np.float64) / np.asarray(norm, dtype=np.float64)
    return np.where(np.asarray(value) == 0, 0.0, ratio)


def compare_values(
    step: int, stage: str, ranks: Int64, values: Float64, *, tolerance: float
) -> Comparison:
    """Numbers, float64 [R], that must be the same on all ranks; NaN is the same as NaN.

    `distance` is then the difference of the numbers: for norms, a lower bound of the distance.
    """
    if bool((values == values[0]).all()):
        return agreed(step, stage, ranks)
    order = np.argsort(values, kind="stable")  # NaN last
    ordered = values[order]
    with np.errstate(invalid="ignore"):
        gap = np.diff(ordered)
        breaks = gap > tolerance * np.abs(ordered[1:])
    # Infinity is no neighbour of anything, and neither is NaN.
    breaks |= np.isinf(ordered[1:]) & (ordered[1:] != ordered[:-1])
    breaks |= np.isinf(ordered[:-1]) & (ordered[1:] != ordered[:-1])
    breaks |= np.isnan(ordered[1:]) & ~np.isnan(ordered[:-1])
    group = np.empty(len(values), dtype=np.int64)
    group[order] = np.concatenate([[0], np.cumsum(breaks)])
    labels, decided = labels_of(group)
    if not labels.any():
        return agreed(step, stage, ranks)
    reference = values[int(np.argmax(labels == 0))]
    with np.errstate(invalid="ignore"):
        distance = np.where(labels == 0, 0.0, np.abs(values - reference))
        relative = np.where(labels == 0, 0.0, _ratio(distance, np.abs(reference)))
    return Comparison(step, stage, ranks, labels, distance, relative, decided)


def largest_equal(
    fingerprints: Mapping[int, Mapping[str, wire.Fingerprint]],
) -> dict[int, Mapping[str, wire.Fingerprint]]:
    """Those of the largest set of ranks that report as many tensors of the same tables."""
    classes: dict[Any, dict[int, Mapping[str, wire.Fingerprint]]] = defaultdict(dict)
    for rank, of_rank in fingerprints.items():
        key = tuple(sorted((name, len(made.digests)) for name, made in of_rank.items()))
        classes[key][rank] = of_rank
    return max(classes.values(), key=len, default={})
