"""What ranks say of their own tensors, where no other rank holds the same: which of them changed.

Ranks that hold parts of one model (shards of FSDP) have no replica to be compared with. Something
else than the optimizer that writes a tensor writes all of its parts: averages, clamping, a
checkpoint. Where it has changed on some of the ranks that hold a part of it and not on the others,
one of them has done what the rest has not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rankscope.server.comparison.compare import labels_of
from rankscope.server.window import Bool, Comparison, Float64, Int64, TensorDifference

_MAX_TENSORS = 64


@dataclass(frozen=True, slots=True)
class Change:
    """What one rank says of the tensors that it holds parts of.

    Attributes:
        table: name of the table.
        names: [T], the same on all ranks.
        shapes: of this rank's parts, [T].
        changed: bool [T].
        by: sketches of the change, float64 [T, K], or None where they are not known.
        of: sketches of what has changed, float64 [T, K], or None.
    """

    table: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    changed: Bool
    by: Float64 | None = None
    of: Float64 | None = None


def changed_alone(
    step: int, stage: str, changes: Mapping[int, Change], *, tensor_count: int = 0
) -> Comparison | None:
    """Ranks of one model on which tensors changed that did not change on others, or the reverse.

    Args:
        changes: by rank, of one table.
        tensor_count: of the whole model; 0: those of the table.

    Returns:
        None where each tensor has changed on all ranks that hold a part of it, or on none.
    """
    ranks = np.array(sorted(changes), dtype=np.int64)
    every = [changes[rank] for rank in ranks.tolist()]
    if len(every) < 2 or any(one.names != every[0].names for one in every):
        return None
    changed = np.stack([one.changed for one in every])
    if not changed.any():
        return None
    holds = np.array([[math.prod(shape) > 0 for shape in one.shapes] for one in every])
    some = (changed & holds).any(axis=0) & (~changed & holds).any(axis=0)
    rows = np.flatnonzero(some)
    if not len(rows):
        return None
    # Who holds nothing of a tensor is none of those on which it changed.
    words = np.unique(changed[:, rows] & holds[:, rows], axis=0, return_inverse=True)[1].ravel()
    labels, decided = labels_of(words)
    tensors = [_tensor(int(row), ranks, every, changed[:, row]) for row in rows[:_MAX_TENSORS]]
    return Comparison(
        step=step,
        stage=stage,
        ranks=ranks,
        clusters=labels,
        distance=_of_ranks(labels, ranks, tensors, "distance"),
        relative=_of_ranks(labels, ranks, tensors, "relative"),
        decided=decided,
        tensors=tuple(tensors),
        tensor_count=tensor_count or len(every[0].names),
    )


def _tensor(row: int, ranks: Int64, every: Sequence[Change], changed: Bool) -> TensorDifference:
    who = np.flatnonzero(changed)
    first = every[int(who[0])]
    distance = relative = math.nan
    buckets = 0
    if first.by is not None:
        distance = float(np.linalg.norm(first.by[row]))
        buckets = int((first.by[row] != 0).sum())
        norm = math.nan if first.of is None else float(np.linalg.norm(first.of[row]))
        relative = distance / norm if norm > 0 else math.nan
    return TensorDifference(
        name=first.names[row],
        shape=first.shapes[row],
        ranks=tuple(ranks[who].tolist()),
        distance=distance,
        relative=relative,
        buckets=buckets,
        table=first.table,
    )


def _of_ranks(labels: Int64, ranks: Int64, tensors: Sequence[TensorDifference], of: str) -> Float64:
    """For each rank outside the largest group the largest of its tensors; NaN for not known."""
    found = np.where(labels == 0, 0.0, np.nan)
    for place, rank in enumerate(ranks.tolist()):
        own = [getattr(t, of) for t in tensors if rank in t.ranks]
        if labels[place] and own and not any(map(math.isnan, own)):
            found[place] = max(own)
    return found
