"""Whether the parameters that ranks hold after an average are the mean of what they held before.

Each rank reports by how much its tensors have changed between two steps. An average takes every
rank to the mean of all, so that these changes add up to zero over the ranks: it moves parameters
between ranks and adds nothing. That holds for averages of pairs and of rings as well, and whatever
the ranks have learned for themselves meanwhile. Sketches are linear, so that it holds for them too.

Where all ranks hold A = sum of w_r p_r afterwards (sum of w_r = 1) instead of the mean M, the
change of rank r is C_r = A - p_r, and the mean change is E = A - M = sum of (w_r - 1/N) (p_r - M),
with p_r - M = E - C_r: least squares gives the weights. Where that explains nothing, and it is
known what the ranks held before, a multiple of M is tried, and then what all of them held after the
average before, as a rank has it that gives an old copy. Pure.

Shapes: R ranks of one replica class, T tensors, K buckets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from rankscope.agent import wire
from rankscope.server.window import Average, Float64

STAGE = "average"
# Ranks whose weights are looked for: with as many as equations everything is explained.
_MAX_RANKS = 256
# Singular values that are zero, relative: the deviations from the mean add up to zero.
_SINGULAR = 1e-6
# What ranks wrote, over the parameters' own size, below which an average is mostly rounding:
# float32 leaves 6e-8 of each element, and a fiftieth of what was written is judged.
_ROUNDED = 1e-5
# Share of what was written that may be left for rounding where something explains it.
_LEFT = 0.01


class Averages:
    """The averages of a run, with what is known of the parameters before them."""

    def __init__(self) -> None:
        self._step = -2
        self._held: dict[int, wire.Fingerprint] = {}
        # Members -> what all of them held after the last average.
        self._together: dict[tuple[int, ...], Float64] = {}

    def held(self, step: int, prints: Mapping[int, Mapping[str, wire.Fingerprint]]) -> None:
        """Takes the parameters after a step, by rank and table."""
        self._step = step
        self._held = {rank: next(iter(of.values())) for rank, of in prints.items() if len(of) == 1}

    def averaged(
        self,
        step: int,
        members: Sequence[int],
        changes: Mapping[int, Mapping[str, wire.Fingerprint]],
        names: Sequence[str] = (),
    ) -> Average | None:
        """What became of the mean of the parameters before a step; None where not all report it.

        Args:
            members: ranks that hold replicas.
            changes: by rank and table.
            names: of the tensors of the table.
        """
        stacked = _stacked(members, changes)
        if stacked is None:
            return None
        ranks = tuple(members)
        size = math.sqrt(float((stacked**2).sum()) / len(ranks))
        if not (math.isfinite(size) and size > _ROUNDED * self._size(step, ranks[0])):
            return None
        moved = stacked.mean(axis=0)
        deviations = moved - stacked
        if np.linalg.norm(deviations) <= _ROUNDED * size * math.sqrt(len(ranks)):
            return None  # all wrote the same: they held the same before, and nothing was averaged
        share = float(np.linalg.norm(moved)) / size
        apart = self._apart(step, members, changes, names)
        mean = self._mean(step, ranks[0], deviations[0])
        earlier = self._together.pop(ranks, None)
        if mean is not None:
            self._together[ranks] = mean + moved
        if len(ranks) > _MAX_RANKS or len(moved) < 2 * len(ranks):
            return Average(step=step, ranks=ranks, share=share, apart=apart)
        odd, left = _fitted(deviations, moved, size)
        made = Average(
            step=step,
            ranks=ranks,
            share=share,
            weights=tuple((1.0 / len(ranks) + odd).tolist()),
            left=left,
            apart=apart,
        )
        if left <= _LEFT or mean is None:
            return made
        return _explained(made, deviations, moved, size, mean, earlier)

    def _size(self, step: int, first: int) -> float:
        """Norm of a rank's parameters before the step; 0 where it is not known."""
        held = self._held.get(first)
        if self._step != step - 1 or held is None or held.sketches is None:
            return 0.0
        return float(np.linalg.norm(held.sketches.astype(np.float64)))

    def _mean(self, step: int, first: int, deviation: Float64) -> Float64 | None:
        """The ranks' mean before the step, [T * K]; None where it is not known."""
        held = self._held.get(first)
        if self._step != step - 1 or held is None or held.sketches is None:
            return None
        own = held.sketches.astype(np.float64).ravel()
        return own - deviation if len(own) == len(deviation) else None

    def _apart(
        self,
        step: int,
        members: Sequence[int],
        changes: Mapping[int, Mapping[str, wire.Fingerprint]],
        names: Sequence[str],
    ) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Tensors that most ranks hold alike after it and some do not, where all hold others so."""
        if self._step != step - 1 or len(members) < 3 or not set(members) <= self._held.keys():
            return ()
        rows = [
            self._held[rank].digests + next(iter(changes[rank].values())).digests
            for rank in members
            if len(changes[rank]) == 1
        ]
        if len({len(row) for row in (*rows, names)}) != 1 or len(rows) != len(members):
            return ()
        after = np.stack(rows)
        differing = np.flatnonzero((after != after[0]).any(axis=0))
        if 2 * len(differing) > len(names):
            return ()
        found = []
        for column in differing.tolist():
            values, counts = np.unique(after[:, column], return_counts=True)
            if 2 * int(counts.max()) > len(members):
                usual = values[counts.argmax()]
                odd = tuple(r for r, v in zip(members, after[:, column], strict=True) if v != usual)
                found.append((names[column], odd))
        return tuple(found)


def _fitted(regressors: Float64, moved: Float64, size: float) -> tuple[Float64, float]:
    """Least squares: coefficients of the rows, and what they leave, over `size`."""
    found, *_ = np.linalg.lstsq(regressors.T, moved, rcond=_SINGULAR)
    odd = found.astype(np.float64)
    return odd, float(np.linalg.norm(moved - regressors.T @ odd)) / size


def _explained(
    made: Average,
    deviations: Float64,
    moved: Float64,
    size: float,
    mean: Float64,
    earlier: Float64 | None,
) -> Average:
    """The same with a multiple of the mean, or an earlier average, where that explains it."""
    ranks = len(made.ranks)
    # To the size of the others: what is small beside another singular value counts as zero.
    unit = size / max(float(np.linalg.norm(mean)), 1e-300)
    odd, left = _fitted(np.vstack((deviations, unit * mean)), moved, size)
    if left <= _LEFT:
        weights = tuple((1.0 / ranks + odd[:-1]).tolist())
        return replace(made, weights=weights, left=left, scale=1.0 + unit * float(odd[-1]))
    if earlier is None:
        return made
    odd, left = _fitted(np.vstack((deviations, earlier - mean)), moved, size)
    if left > _LEFT:
        return made
    # The deviations add up to zero, so that any number may be added to all of their weights: those
    # of the ranks and of the earlier average add up to one.
    known = float(odd[-1])
    weights = tuple(((1.0 - known) / ranks + odd[:-1] - odd[:-1].mean()).tolist())
    return replace(made, weights=weights, left=left, earlier=known)


def _stacked(
    members: Sequence[int], changes: Mapping[int, Mapping[str, wire.Fingerprint]]
) -> Float64 | None:
    """Sketches of all tensors of the ranks, [R, T * K]."""
    rows: list[Float64] = []
    for rank in members:
        of_rank = changes.get(rank)
        if not of_rank:
            return None
        made = next(iter(of_rank.values()))
        if made.sketches is None or (rows and made.sketches.size != len(rows[0])):
            return None
        rows.append(made.sketches.astype(np.float64).ravel())
    return np.stack(rows) if len(rows) > 1 else None
