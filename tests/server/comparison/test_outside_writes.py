"""Which tensors a rank wrote between two steps, where its replicas wrote nothing."""

import numpy as np

from rankscope.agent import wire
from rankscope.server.comparison.outside import STAGE, unchanged_too
from rankscope.server.window import Series

RANKS, STEPS = np.arange(3), np.arange(4, 7)


def written(tensors=2, digest=7):
    digests = np.zeros(tensors, np.uint64)
    digests[1] = digest
    return {
        "parameters": wire.Fingerprint(
            step=5, stage=STAGE, table="parameters", digests=digests, sketches=np.ones((tensors, 4))
        )
    }


def words(*at_5):
    values = np.zeros((3, 3), np.uint64)
    values[:, 1] = at_5
    return Series(values, np.ones((3, 3), dtype=bool))


def test_ranks_that_wrote_nothing_have_changed_by_nothing():
    found = unchanged_too({1: written()}, words(0, 7, 0), RANKS, STEPS, 5)
    assert sorted(found) == [0, 1, 2]
    assert not found[0]["parameters"].digests.any()
    assert not found[2]["parameters"].sketches.any()
    assert found[1]["parameters"].digests[1] == 7


def test_of_a_rank_that_wrote_and_does_not_say_what_nothing_is_known():
    found = unchanged_too({1: written()}, words(3, 7, 0), RANKS, STEPS, 5)
    assert sorted(found) == [1, 2]


def test_nor_where_ranks_hold_different_parts_or_the_step_is_not_known():
    prints = {0: written(3), 1: written()}
    assert unchanged_too(prints, words(1, 7, 0), RANKS, STEPS, 5) is prints
    assert unchanged_too({1: prints[1]}, words(0, 7, 0), RANKS, STEPS, 9).keys() == {1}
