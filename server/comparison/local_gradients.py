"""What the ranks' own gradients show: where they point, their reduction, sums of small ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from rankscope.agent import wire
from rankscope.server.comparison import (
    compare,
    compressed_shares,
    conservation,
    directions,
    element_sums,
    fidelity,
)
from rankscope.server.comparison.applied import applied
from rankscope.server.comparison.compression import Compression
from rankscope.server.comparison.conservation import Sums
from rankscope.server.comparison.replicas import Replicas
from rankscope.server.window import (
    Applied,
    ElementSums,
    Float64,
    GradientProducts,
    Int64,
    Reduction,
)

# Numbers of all ranks' sketches up to which those of a step are kept for the next: 2 MB.
_MOST_KEPT = 250_000


class _Mean(NamedTuple):
    """What went into a reduction of which the ranks did not hold one result, float64 [T, K]."""

    step: int
    mean: Float64


class _Stacked(NamedTuple):
    """Sketches of several ranks.

    Attributes:
        ranks: int64 [R].
        table: of the tensors, and its name.
        sketches: float64 [R, T, K].
    """

    ranks: Int64
    name: str
    table: wire.TensorTable
    sketches: Float64


@dataclass(slots=True)
class Found:
    """What local gradients show, step by step and replica class by replica class."""

    reductions: list[Reduction] = field(default_factory=list)
    sums: list[ElementSums] = field(default_factory=list)
    products: list[GradientProducts] = field(default_factory=list)

    def add(self, later: Found) -> None:
        """Takes what a later step shows."""
        self.reductions += later.reductions
        self.sums += later.sums
        self.products += later.products


class LocalGradients:
    """Goes through the steps at which local gradients were fingerprinted.

    Args:
        replicas: which ranks hold the same tensors, and what they are called.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        # What the last reduction examined came to, for each replica class.
        self._sums: dict[tuple[int, ...], Sums] = {}
        self._apart: dict[tuple[int, ...], _Mean] = {}

    def observe(
        self,
        step: int,
        ranks: Int64,
        local: Mapping[int, Mapping[str, wire.Fingerprint]],
        reduced: Mapping[int, wire.Fingerprint],
        compression: Compression,
        counts: Mapping[str, Mapping[int, float]] | None = None,
    ) -> Found:
        """One step, replica class by replica class.

        Args:
            local: by rank and table.
            reduced: by rank.
            compression: what is done to gradients on their way.
            counts: name -> rank -> tokens or samples of the step.
        """
        made = Found()
        for rows in self._replicas.classes("parameters", ranks):
            if len(rows) < 2:
                continue
            members = ranks[rows]
            stacked = self._stacked([int(r) for r in members if local.get(int(r))], local)
            if stacked is None:
                continue
            names = compare.joined_table({stacked.name: stacked.table}).names
            found = element_sums.of_elements(
                step, stacked.ranks, stacked.sketches, names, stacked.table.shapes
            )
            if found is not None:
                made.sums.append(found)
            # A sum of which a part is missing is none.
            if len(stacked.ranks) < len(members):
                continue
            made.products.append(directions.of_gradients(step, stacked.ranks, stacked.sketches))
            if all(int(r) in reduced for r in members):
                reduction = self._reduction(step, stacked, reduced, compression, counts or {})
                if reduction is not None:
                    made.reductions.append(reduction)
        return made

    def _stacked(
        self, ranks: Sequence[int], local: Mapping[int, Mapping[str, wire.Fingerprint]]
    ) -> _Stacked | None:
        if not ranks:
            return None
        name, first = next(iter(local[ranks[0]].items()))
        sketches, known = [], []
        for rank in ranks:
            made = local[rank].get(name)
            if made is None or made.sketches is None:
                continue
            if made.sketches.shape == first.digests.shape + made.sketches.shape[1:]:
                sketches.append(made.sketches)
                known.append(rank)
        if not known:
            return None
        table = self._replicas.described(known[0], first)
        return _Stacked(np.array(known, np.int64), name, table, np.stack(sketches))

    def _reduction(
        self,
        step: int,
        stacked: _Stacked,
        reduced: Mapping[int, wire.Fingerprint],
        compression: Compression,
        counts: Mapping[str, Mapping[int, float]],
    ) -> Reduction | None:
        members, sketches = stacked.ranks, stacked.sketches
        taken = tuple(members.tolist())
        came_out = reduced[taken[0]]
        if came_out.sketches is None or came_out.sketches.shape != sketches[0].shape:
            return None
        counted = {
            name: np.array([known.get(rank, np.nan) for rank in taken])
            for name, known in counts.items()
        }
        digests = np.stack([reduced[rank].digests for rank in taken])
        past = self._sums.get(taken)
        if not bool((digests == digests[0]).all()):
            known = (past, self._apart.get(taken))
            before = next((m.mean for m in known if m is not None and m.step == step - 1), None)
            self._apart[taken] = _Mean(step, sketches.mean(axis=0))
            return Reduction(
                step=step,
                ranks=members,
                tensor_count=len(digests[0]),
                agreed=False,
                applied=_applied(stacked, reduced, compression, counted, before),
            )
        made = conservation.balance(
            step,
            members,
            sketches,
            came_out.sketches,
            compare.joined_table({stacked.name: stacked.table}),
            dtypes=stacked.table.dtypes,
            compression=compression,
            before=past,
            counts=counted,
        )
        mean = conservation.expected_mean(sketches, made.weighted_by, counted)
        kept = sketches if sketches.size <= _MOST_KEPT else None
        self._sums[taken] = Sums(step, mean, came_out.sketches, kept)
        approximate = made.pattern == "other" or 0 < made.known == made.compressed
        return replace(
            made,
            shares=compressed_shares.of_ranks(sketches, came_out.sketches) if approximate else (),
            cosine=fidelity.cosine(sketches, came_out.sketches),
            emptied=fidelity.emptied(
                sketches, came_out.sketches, None if past is None else past.reduced
            ),
            # Of what is no multiple of the mean the factor is not known: clipping stays in.
            kept=fidelity.kept(
                sketches,
                came_out.sketches,
                1.0 if made.pattern in ("other", "late") else made.ratio,
            ),
        )


def _applied(
    stacked: _Stacked,
    reduced: Mapping[int, wire.Fingerprint],
    compression: Compression,
    counts: Mapping[str, Float64],
    before: Float64 | None,
) -> Applied | None:
    """What each rank applied, where they do not agree; `before`: the mean of the step before."""
    shape = stacked.sketches[0].shape
    came = [
        made.sketches
        for rank in stacked.ranks.tolist()
        if (made := reduced[rank]).sketches is not None and made.sketches.shape == shape
    ]
    if len(came) < len(stacked.ranks):
        return None
    return applied(
        stacked.sketches,
        np.stack(came),
        compare.joined_table({stacked.name: stacked.table}),
        dtypes=stacked.table.dtypes,
        compression=compression,
        counts=counts,
        before=before,
    )
