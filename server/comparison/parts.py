"""Ranks that compute one loss together with different values of some tensors: parts of one model.

Tensor and expert parallelism by hand cut tensors into parts of equal shape and name, and nothing in
the tables says so. What says so is the arithmetic: with the same batch, ranks whose tensors differ
get losses that differ, unless what each computes goes into the loss of all. Two losses of 24 bits
are the same by chance once in millions.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rankscope.agent import wire
from rankscope.server.comparison.compare import labels_of
from rankscope.server.comparison.replicas import Replicas
from rankscope.server.window import Bool, Float64, Int64

_TABLE = "parameters"


def find_parts(
    replicas: Replicas,
    start: Mapping[int, Mapping[str, wire.Fingerprint]],
    ranks: Int64,
    alike: Bool,
) -> dict[int, dict[str, int]]:
    """Rank -> name of a tensor -> which part of it the rank holds.

    Empty unless every rank of a class has one beside it that holds other values and got the same
    loss of the same batch; and unless all tensors that differ are cut between the same ranks.

    Args:
        start: what the ranks held when the monitor was attached, by rank and table.
        alike: bool [R, R], ranks that had the same batch and the same loss at the first step.
    """
    found: dict[int, dict[str, int]] = {}
    for rows in replicas.classes(_TABLE, ranks):
        members = ranks[rows].tolist()
        held = [
            {name: made for name, made in start.get(rank, {}).items() if name.startswith(_TABLE)}
            for rank in members
        ]
        if len(members) < 2 or not all(len(tables) == 1 for tables in held):
            continue
        made = [next(iter(tables.values())) for tables in held]
        names = replicas.described(members[0], made[0]).names
        if any(len(one.digests) != len(names) for one in made):
            continue
        digests = np.stack([one.digests for one in made])
        differing = np.flatnonzero((digests != digests[0]).any(axis=0))
        if not len(differing):
            continue
        parts = [labels_of(digests[:, column])[0] for column in differing]
        others = parts[0][:, None] != parts[0][None, :]
        together = alike[np.ix_(rows, rows)]
        if not (together & others).any(axis=1).all() or any((p != parts[0]).any() for p in parts):
            continue
        for rank, part in zip(members, parts[0].tolist(), strict=True):
            found[rank] = {names[column]: part for column in differing}
    return found


def same_at_first(losses: Float64, batches: Int64, known: Bool) -> Bool:
    """Which ranks, bool [R, R], had the same batch and the same loss at a step.

    Args:
        losses, batches: of each rank, [R].
        known: bool [R], where both are.
    """
    finite = known & np.isfinite(losses)
    both: Bool = (losses[:, None] == losses[None, :]) & (batches[:, None] == batches[None, :])
    return both & finite[:, None] & finite[None, :]
