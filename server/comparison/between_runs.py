"""Two runs, rank by rank: the first step and link at which a rank of one differs from the other's.

The same digests by which the ranks of a run are compared; here the two that are compared are one
rank in both runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rankscope.agent import wire
from rankscope.server.comparison.compare import compare_fingerprints, joined_table
from rankscope.server.window import (
    Digests,
    FingerprintKey,
    Int64,
    TensorDifference,
    joined_fingerprint,
)

_ORDER = {stage: place for place, stage in enumerate(wire.STAGES)}


@dataclass(frozen=True, slots=True)
class Differing:
    """The first step and link at which ranks differ between the runs.

    Attributes:
        ranks: those that differ there.
    """

    step: int
    stage: str
    ranks: tuple[int, ...]

    @property
    def place(self) -> tuple[int, int]:
        """By which of two comes first: the step, and within it the link of the chain."""
        return self.step, _ORDER[self.stage]


@dataclass(frozen=True, slots=True)
class Met:
    """Steps at which both runs say something of the same link of the same rank.

    Attributes:
        steps: int64, ascending, of any link and rank.
        ranks: of which there is any such step.
    """

    steps: Int64
    ranks: frozenset[int]


def first_of_digests(one: Digests, other: Digests) -> tuple[Differing | None, Met]:
    """The first difference of model digests, and the steps at which both have any."""
    differing: dict[tuple[int, str], list[int]] = {}
    steps: list[Int64] = []
    ranks = set()
    for stage, rank in sorted(one.keys() & other.keys()):
        (a, left), (b, right) = one[stage, rank], other[stage, rank]
        common, at, bt = np.intersect1d(a, b, assume_unique=True, return_indices=True)
        if not len(common):
            continue
        steps.append(common)
        ranks.add(rank)
        wrong = np.flatnonzero(left[at] != right[bt])
        if len(wrong):
            differing.setdefault((int(common[wrong[0]]), stage), []).append(rank)
    met = np.unique(np.concatenate(steps)) if steps else np.empty(0, np.int64)
    found = [Differing(step, stage, tuple(who)) for (step, stage), who in differing.items()]
    return min(found, key=lambda d: d.place, default=None), Met(met, frozenset(ranks))


def in_order(keys: Iterable[FingerprintKey]) -> list[tuple[int, str, list[int]]]:
    """Steps and links in the order in which they come, each with its ranks."""
    groups: dict[tuple[int, str], list[int]] = {}
    for key in sorted(keys, key=lambda k: (k.step, _ORDER[k.stage], k.rank)):
        groups.setdefault((key.step, key.stage), []).append(key.rank)
    return [(step, stage, ranks) for (step, stage), ranks in groups.items()]


def differing_tensors(
    key: FingerprintKey,
    one: Mapping[str, wire.Fingerprint],
    other: Mapping[str, wire.Fingerprint],
    tables: Mapping[str, wire.TensorTable],
) -> tuple[TensorDifference, ...] | None:
    """Tensors of a rank that differ between two runs; None where they cannot be compared.

    Args:
        one, other: by table.
        tables: those that are the same in both runs.
    """
    names = sorted(one.keys() & other.keys() & tables.keys())
    names = [n for n in names if len(one[n].digests) == len(other[n].digests)]
    if not names:
        return None
    held = [joined_fingerprint({n: made[n] for n in names}) for made in (one, other)]
    table = joined_table({n: tables[n] for n in names})
    if len(held[0].digests) != len(table.names):
        return None
    if len({None if h.sketches is None else h.sketches.shape for h in held}) > 1:
        held = [replace(made, sketches=None) for made in held]
    found = compare_fingerprints(key.step, key.stage, np.arange(2), held, table)
    return found.tensors


def same_tables(
    one: Mapping[str, wire.TensorTable], other: Mapping[str, wire.TensorTable]
) -> dict[str, wire.TensorTable]:
    """Tables that both have, with the same tensors in the same order."""
    return {
        name: table
        for name, table in one.items()
        if name in other
        and (table.names, table.shapes, table.shards)
        == (other[name].names, other[name].shapes, other[name].shards)
    }


def merged(found: Sequence[tuple[int, Sequence[TensorDifference]]]) -> list[TensorDifference]:
    """Each differing tensor once, with its ranks and the largest of its differences.

    Args:
        found: rank and what differs on it, each.
    """
    by_name: dict[tuple[str, str], TensorDifference] = {}
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, tensors in found:
        for tensor in tensors:
            key = (tensor.table, tensor.name)
            ranks.setdefault(key, []).append(rank)
            known = by_name.get(key)
            if known is None or not tensor.relative <= known.relative:
                by_name[key] = tensor
    return [
        TensorDifference(
            name=t.name,
            shape=t.shape,
            ranks=tuple(ranks[key]),
            distance=t.distance,
            relative=t.relative,
            buckets=t.buckets,
            table=t.table,
        )
        for key, t in by_name.items()
    ]
