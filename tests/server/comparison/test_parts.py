"""Ranks that compute one loss together with different values of some tensors."""

import numpy as np
import pytest

from rankscope.agent import wire
from rankscope.server.evaluation.align import Aligner
from rankscope.server.window import FingerprintPart, LivenessPart, NewData, RankLiveness
from tests.support.runs.columns import of_rank

NAMES = ("norm", "column")
TABLES = {
    rank: {"parameters": wire.TensorTable(NAMES, ((4,),) * 2, ("f",) * 2, ("",) * 2)}
    for rank in range(4)
}


def fingerprints(step, stage, digests):
    return [
        FingerprintPart(
            rank,
            0,
            wire.Fingerprint(
                step=step,
                stage=stage,
                table="parameters",
                digests=np.array(of_rank_, np.uint64),
                sketches=np.array(of_rank_)[:, None] * np.ones((2, 4)),
            ),
        )
        for rank, of_rank_ in enumerate(digests)
    ]


def judged(start, gradients, *, losses, batches):
    """Comparisons of a run of two steps.

    Args:
        start, gradients: digests of `norm` and `column`, by rank.
        losses, batches: of the first step, by rank.
    """
    count = len(start)
    aligner = Aligner({"loss"})
    steps = np.arange(2)
    columns = [
        of_rank(r, 0, "loss", steps, np.array([loss, loss + 1.0])) for r, loss in enumerate(losses)
    ]
    digests = [
        of_rank(r, 0, "batch", steps, np.array([batch, batch + 100], np.uint64))
        for r, batch in enumerate(batches)
    ]
    aligner.add(
        NewData(
            arrival=1,
            more=False,
            columns=tuple(columns),
            digests=tuple(digests),
            fingerprints=(
                *fingerprints(0, "start", start),
                *fingerprints(0, "reduced_gradient", gradients),
                *fingerprints(1, "parameters", start),
            ),
            liveness=tuple(
                LivenessPart(RankLiveness(r, 95.0, 100.0, 1), 0, 1, 0.0) for r in range(count)
            ),
            tables={rank: TABLES[rank] for rank in range(count)},
            world_size=count,
            config={},
        )
    )
    windows = list(aligner.windows(100.0))
    found = [c for window in windows for c in window.comparisons if not c.equal]
    return {(c.stage, tuple(t.name for t in c.tensors)) for c in found}, windows[-1].classes


def test_parts_of_one_model_need_not_be_equal():
    found, classes = judged([(1, 2), (1, 3)], [(5, 6), (5, 7)], losses=[2.0, 2.0], batches=[9, 9])
    assert not found
    assert classes == ((0,), (1,))


def test_what_both_hold_is_compared():
    found, _ = judged([(1, 2), (1, 3)], [(4, 6), (5, 7)], losses=[2.0, 2.0], batches=[9, 9])
    assert found == {("reduced_gradient", ("norm",))}


def test_two_replicas_of_two_parts():
    start = [(1, 2), (1, 3), (1, 2), (1, 3)]
    gradients = [(5, 6), (5, 7), (5, 6), (5, 7)]
    losses = [2.0, 2.0, 1.5, 1.5]
    found, classes = judged(start, gradients, losses=losses, batches=[9, 9, 8, 8])
    assert not found
    assert classes == ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("losses", "batches"),
    [([2.0, 2.5], [9, 9]), ([2.0, 2.0], [9, 8]), ([np.nan, np.nan], [9, 9])],
)
def test_ranks_that_compute_for_themselves_are_replicas(losses, batches):
    found, classes = judged([(1, 2), (1, 3)], [(5, 6), (5, 7)], losses=losses, batches=batches)
    assert ("start", ("column",)) in found
    assert classes == ((0, 1),)


def test_one_rank_with_other_values_whose_loss_differs_is_a_desync():
    start = [(1, 2), (1, 2), (1, 3)]
    found, classes = judged(start, start, losses=[2.0, 2.0, 2.5], batches=[9, 9, 9])
    assert ("start", ("column",)) in found
    assert classes == ((0, 1, 2),)
