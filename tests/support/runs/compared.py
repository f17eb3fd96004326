"""Runs of which single comparisons of the ranks are given, as samples of some steps show them."""

from dataclasses import replace

import numpy as np

from rankscope.server.comparison import compare
from rankscope.server.window import Comparison
from tests.support.runs.traces import Trace


def of_ranks(comparison, *ranks):
    """The same sample, which these ranks alone have reported."""
    rows = np.flatnonzero(np.isin(comparison.ranks, ranks))
    labels, decided = compare.labels_of(comparison.clusters[rows])
    if not labels.any():
        return compare.agreed(comparison.step, comparison.stage, comparison.ranks[rows])
    return replace(
        comparison,
        ranks=comparison.ranks[rows],
        clusters=labels,
        distance=comparison.distance[rows],
        relative=comparison.relative[rows],
        decided=decided,
    )


class Unwrapped(Trace):
    """A run that nothing is known to keep equal: no wrapper reduces its gradients."""

    def windows(self, cuts=()):
        for window in super().windows(cuts):
            yield replace(window, config={"data_parallel": ""})


def run(comparisons, *, ranks=4, steps=60, kind=Trace, **series):
    """A run with these comparisons and series, float64 [ranks, steps]; NaN is not posted."""
    loss = np.ones((ranks, steps))
    present = {name: ~np.isnan(values) for name, values in series.items()}
    values = {name: np.nan_to_num(held) for name, held in series.items()}
    return kind(
        "made",
        0,
        np.arange(steps),
        {"loss": loss, **values},
        present=present,
        comparisons=tuple(sorted(comparisons, key=lambda c: c.step)),
    )


def differing(step, stage, clusters, tensors=(), of=0):
    """One at which ranks differ: those with equal numbers in `clusters` agree with each other."""
    labels, decided = compare.labels_of(np.array(clusters))
    size = np.where(labels == 0, 0.0, 0.1)
    ranks = np.arange(len(clusters))
    return Comparison(step, stage, ranks, labels, size, size, decided, tuple(tensors), of)


def equal(step, stage, ranks=4):
    """One at which all ranks agree."""
    return compare.agreed(step, stage, np.arange(ranks))
