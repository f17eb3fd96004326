"""Averages of parameters, by what each rank's tensors were changed by."""

import numpy as np
import pytest

from rankscope.agent import wire
from rankscope.server.comparison.averages import averaged

RANKS, TENSORS, BUCKETS = 4, 3, 16


def changes_to(after, before):
    """By rank and table, what ranks post where they hold `after` and held `before`."""
    made = {}
    for rank, own in enumerate(before):
        sketches = (after[rank] - own).astype(np.float32)
        digests = np.ones(TENSORS, dtype=np.uint64)
        print_ = wire.Fingerprint(
            stage="average", step=7, table="parameters", digests=digests, sketches=sketches
        )
        made[rank] = {"parameters": print_}
    return made


def held(seed=0):
    draw = np.random.default_rng(seed)
    common = draw.normal(size=(TENSORS, BUCKETS))
    return common + 0.01 * draw.normal(size=(RANKS, TENSORS, BUCKETS))


def judged(after, before):
    return averaged(7, range(RANKS), changes_to(after, before))


def test_a_mean_moves_nothing():
    before = held()
    made = judged([before.mean(axis=0)] * RANKS, before)
    assert made.share < 1e-5
    assert made.weights == pytest.approx([1 / RANKS] * RANKS, abs=1e-4)


def test_means_of_pairs_move_nothing():
    before = held()
    low, high = before[:2].mean(axis=0), before[2:].mean(axis=0)
    assert judged([low, low, high, high], before).share < 1e-5


@pytest.mark.parametrize(
    "weights", [(1 / 5, 2 / 5, 1 / 5, 1 / 5), (1 / 3, 0, 1 / 3, 1 / 3), (0.1, 0.2, 0.3, 0.4)]
)
def test_what_each_rank_counts(weights):
    before = held()
    made = judged([np.tensordot(weights, before, axes=1)] * RANKS, before)
    assert made.share > 0.05
    assert made.left < 1e-4
    assert made.weights == pytest.approx(weights, abs=1e-4)


def test_other_parameters_than_those_that_are_trained_are_not_explained():
    before = held()
    given = before.copy()
    given[1] += 0.01 * np.random.default_rng(1).normal(size=given[1].shape)
    made = judged([given.mean(axis=0)] * RANKS, before)
    assert made.share > 0.1
    assert made.left > 0.1


def test_a_rank_that_does_not_report_leaves_it_unknown():
    before = held()
    changes = changes_to([before.mean(axis=0)] * RANKS, before)
    del changes[2]
    assert averaged(7, range(RANKS), changes) is None


def test_nothing_written_is_no_average():
    before = held()
    assert judged(before, before) is None
