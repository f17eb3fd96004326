"""Averages of parameters, by what each rank's tensors were changed by."""

from dataclasses import replace

import numpy as np
import pytest

from rankscope.agent import wire
from rankscope.server.comparison.averages import Averages

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
    return Averages().averaged(7, range(RANKS), changes_to(after, before))


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
    assert Averages().averaged(7, range(RANKS), changes) is None


@pytest.mark.parametrize(("moved", "known"), [(1e-7, False), (1e-3, True)])
def test_an_average_of_what_ranks_moved_by_less_than_rounding(moved, known):
    draw = np.random.default_rng(0)
    common = draw.normal(size=(TENSORS, BUCKETS))
    before = common + moved * draw.normal(size=(RANKS, TENSORS, BUCKETS))
    averages = Averages()
    prints = {
        rank: {
            "parameters": wire.Fingerprint(
                stage="parameters",
                step=6,
                table="parameters",
                digests=np.full(TENSORS, rank, dtype=np.uint64),
                sketches=own.astype(np.float32),
            )
        }
        for rank, own in enumerate(before)
    }
    averages.held(6, prints)
    changes = changes_to([before.mean(axis=0)] * RANKS, before)
    assert (averages.averaged(7, range(RANKS), changes) is not None) == known


def test_nothing_written_is_no_average():
    before = held()
    assert judged(before, before) is None


def following(before, after, *, names=("a", "b", "c"), first=None):
    """The same where it is known what the ranks held before; `first`: after the average before."""
    averages = Averages()

    def parameters(step, values):
        made = {}
        for rank, own in enumerate(values):
            digests = np.round(own[:, 0] * 2**40).astype(np.int64).astype(np.uint64)
            print_ = wire.Fingerprint(
                stage="parameters", step=step, table="parameters", digests=digests, sketches=own
            )
            made[rank] = {"parameters": print_}
        averages.held(step, made)
        return made

    def change(step, values, to):
        here, there = parameters(step - 1, values), parameters(step - 1, to)
        made = changes_to(to, values)
        for rank, of_rank in made.items():
            digests = there[rank]["parameters"].digests - here[rank]["parameters"].digests
            of_rank["parameters"] = replace(of_rank["parameters"], digests=digests)
        averages.held(step - 1, here)
        return averages.averaged(step, range(RANKS), made, names)

    if first is not None:
        own, mean = first
        change(4, own, [mean] * RANKS)
    return change(8, before, after)


def test_a_sum_divided_by_another_number_is_a_multiple_of_the_mean():
    before = held()
    made = following(before, [before.sum(axis=0) / 3.9] * RANKS)
    assert made.left < 1e-3
    assert made.scale == pytest.approx(4 / 3.9, rel=1e-4)
    assert made.weights == pytest.approx([1 / RANKS] * RANKS, abs=1e-3)


def test_what_a_rank_held_after_the_average_before_counts_in_its_place():
    own, before = held(), held(1)
    mean = own.mean(axis=0)
    before = before - before.mean(axis=0) + mean + 0.02
    given = [*before[:2], mean, before[3]]
    made = following(before, [np.mean(given, axis=0)] * RANKS, first=(own, mean))
    assert made.left < 1e-3
    assert made.earlier == pytest.approx(1 / RANKS, abs=1e-2)
    assert made.weights == pytest.approx((0.25, 0.25, 0, 0.25), abs=1e-2)


def test_a_tensor_that_one_rank_does_not_take_back():
    before = held()
    after = [before.mean(axis=0).copy() for _ in range(RANKS)]
    assert following(before, after).apart == ()
    after[2][1] = before[2][1]
    assert following(before, after).apart == (("b", (2,)),)
    # Of a tensor that is left out on all ranks another finding says so.
    for rank in range(RANKS):
        after[rank][1] = before[rank][1]
    assert following(before, after).apart == ()
