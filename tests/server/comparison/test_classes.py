"""Every replica class is compared, each with itself."""

import numpy as np

from rankscope.server.comparison import compare
from tests.support.runs.chain import chain


def digests(ranks, *values):
    return compare.compare_digests(
        7, "parameters", np.array(ranks, np.int64), np.array(values, np.uint64)
    )


def test_classes_that_agree_are_one_comparison_of_all_ranks():
    merged = compare.merged([digests([0, 2], 5, 5), digests([1, 3], 9, 9)])
    assert merged.equal
    assert merged.ranks.tolist() == [0, 1, 2, 3]


def test_of_classes_of_which_one_differs_that_one_is_reported():
    merged = compare.merged([digests([0, 2, 4], 5, 5, 5), digests([1, 3, 5], 9, 8, 9)])
    assert merged.ranks.tolist() == [1, 3, 5]
    assert merged.deviating == (3,)


def test_each_class_has_a_reference_of_its_own():
    merged = compare.merged([digests([0, 2, 4], 5, 5, 6), digests([1, 3, 5], 9, 8, 9)])
    assert merged.ranks.tolist() == [0, 1, 2, 3, 4, 5]
    assert merged.deviating == (3, 4)
    assert merged.decided
    assert len(set(merged.clusters.tolist())) == 3


def test_a_class_without_majority_leaves_the_whole_undecided():
    merged = compare.merged([digests([0, 2], 5, 6), digests([1, 3, 5], 9, 8, 9)])
    assert not merged.decided


def test_all_classes_of_a_run_are_examined():
    [window] = chain(0, groups=2, steps=6).windows()
    assert window.replicas == ((0, 2), (1, 3))
    parameters = [c for c in window.comparisons if c.stage == "parameters"]
    assert [c.ranks.tolist() for c in parameters] == [[0, 1, 2, 3]] * 6
    assert {tuple(made.ranks.tolist()) for made in window.reductions} == {(0, 2), (1, 3)}


def test_ranks_that_are_alone_with_what_they_hold_have_their_settings_compared_alone():
    [window] = chain(0, groups=4, steps=6).windows()
    assert window.replicas == ((0,), (1,), (2,), (3,))
    # They step with parts of the same tensors: all with one learning rate.
    assert {made.stage for made in window.comparisons} == {"hyperparameters"}
    assert all(made.ranks.tolist() == [0, 1, 2, 3] for made in window.comparisons)
