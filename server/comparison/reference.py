"""The reference of a comparison that has no majority, where it is known who is at fault."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from rankscope.server.comparison.compare import labels_of
from rankscope.server.window import Comparison, Float64, Int64


def without_suspects(comparison: Comparison, suspects: Collection[int]) -> Comparison:
    """Compares with the ranks that nothing blames, where no group of equal ranks is the largest.

    Of two ranks that differ, the bits do not show which one is wrong; what else is known of the run
    may: one applied its own gradient, lost its optimizer's state, ...

    Args:
        suspects: ranks that are known to be wrong.

    Returns:
        A comparison whose cluster 0 is the largest group of the others, the distances measured from
        it where they are known; the same comparison where it has a majority, where these ranks
        share a group with others, or where the others have no largest group.
    """
    named = np.isin(comparison.ranks, list(suspects))
    if comparison.decided or named.all() or not named.any():
        return comparison
    old = comparison.clusters
    if np.isin(old[~named], old[named]).any():
        return comparison
    rest, decided = labels_of(old[~named])
    if not decided:
        return comparison
    reference = int(old[~named][rest == 0][0])
    order = [reference, *(label for label in range(int(old.max()) + 1) if label != reference)]
    clusters = np.argsort(order)[old]
    return replace(
        comparison,
        clusters=clusters,
        distance=_from_reference(comparison.distance, old, reference),
        relative=_from_reference(comparison.relative, old, reference),
        decided=True,
    )


def _from_reference(distance: Float64, clusters: Int64, reference: int) -> Float64:
    """Distances from cluster 0, [R], to those from another one: only that of the two is known."""
    if reference == 0:
        return distance
    result = np.full(len(distance), np.nan)
    result[clusters == reference] = 0.0
    result[clusters == 0] = distance[clusters == reference].max()
    return result
