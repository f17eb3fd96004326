"""Comparison of ranks against brute force, and what must not change its answer."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.agent import wire
from rankscope.server.comparison import compare

TENSORS = 5
TABLE = compare.LabelledTable(
    tuple(f"t{i}" for i in range(TENSORS)), ((2, 2),) * TENSORS, ("parameters",) * TENSORS
)


def ranks(count):
    return np.arange(count, dtype=np.int64)


def fingerprints(contents):
    """Fingerprints of ranks that hold `contents` [R, T, K]; equal contents have equal digests."""
    found = []
    for held in contents:
        digests = np.array([hash(t.tobytes()) % 2**64 for t in held], dtype=np.uint64)
        found.append(
            wire.Fingerprint(step=7, stage="parameters", table="p", digests=digests, sketches=held)
        )
    return found


@given(st.lists(st.integers(0, 3), min_size=2, max_size=12))
def test_clusters_are_those_of_equal_digests(digests):
    found = compare.compare_digests(
        1, "parameters", ranks(len(digests)), np.array(digests, np.uint64)
    )
    for i in range(len(digests)):
        for j in range(len(digests)):
            assert (found.clusters[i] == found.clusters[j]) == (digests[i] == digests[j])
    sizes = [int((found.clusters == c).sum()) for c in range(found.clusters.max() + 1)]
    assert sizes == sorted(sizes, reverse=True)
    assert found.decided == (len(sizes) < 2 or sizes[0] > sizes[1])
    assert found.equal == (len(set(digests)) == 1)
    if not found.equal and not found.decided:
        assert found.deviating == tuple(range(len(digests)))


def test_two_ranks_never_decide():
    found = compare.compare_digests(1, "parameters", ranks(2), np.array([1, 2], np.uint64))
    assert not found.decided
    assert found.deviating == (0, 1)


def test_fingerprints_name_the_tensor_the_rank_and_the_distance():
    held = np.ones((4, TENSORS, 8))
    held[2, 3, 5] += 0.5
    found = compare.compare_fingerprints(7, "parameters", ranks(4), fingerprints(held), TABLE)
    assert found.deviating == (2,)
    assert found.distance.tolist() == [0.0, 0.0, 0.5, 0.0]
    assert found.relative[2] == pytest.approx(0.5 / np.sqrt(8 * TENSORS))
    [tensor] = found.tensors
    assert (tensor.name, tensor.ranks, tensor.distance, tensor.buckets) == ("t3", (2,), 0.5, 1)
    assert tensor.relative == pytest.approx(0.5 / np.sqrt(8))


def test_a_difference_of_no_size_is_still_a_difference():
    held = np.ones((3, TENSORS, 8))
    made = fingerprints(held)
    digests = made[1].digests.copy()
    digests[0] ^= np.uint64(1)  # minus zero, say: other bits, the same values
    made[1] = wire.Fingerprint(
        step=7, stage="parameters", table="p", digests=digests, sketches=made[1].sketches
    )
    found = compare.compare_fingerprints(7, "parameters", ranks(3), made, TABLE)
    assert found.deviating == (1,)
    assert 0.0 < found.distance[1] < 1e-300
    assert found.tensors[0].name == "t0"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_differs_by_an_unknown_amount(bad):
    held = np.ones((3, TENSORS, 8))
    held[1, 2, :] = bad
    found = compare.compare_fingerprints(7, "parameters", ranks(3), fingerprints(held), TABLE)
    assert found.deviating == (1,)
    assert not np.isfinite(found.distance[1])
    assert found.tensors[0].name == "t2"


@settings(deadline=None)
@given(
    seed=st.integers(0, 10_000), count=st.integers(2, 9), kinds=st.integers(1, 4), data=st.data()
)
def test_renumbering_the_ranks_renumbers_the_answer(seed, count, kinds, data):
    generator = np.random.default_rng(seed)
    pool = generator.normal(size=(kinds, TENSORS, 6))
    held = pool[generator.integers(0, kinds, count)]
    order = np.array(data.draw(st.permutations(range(count))))
    straight = compare.compare_fingerprints(
        7, "parameters", ranks(count), fingerprints(held), TABLE
    )
    turned = compare.compare_fingerprints(
        7, "parameters", ranks(count), fingerprints(held[order]), TABLE
    )
    together = straight.clusters[:, None] == straight.clusters[None, :]
    assert (
        (turned.clusters[:, None] == turned.clusters[None, :]) == together[np.ix_(order, order)]
    ).all()
    assert turned.decided == straight.decided
    if straight.decided:
        np.testing.assert_allclose(turned.distance, straight.distance[order], atol=1e-12)
        assert {int(order[r]) for r in turned.deviating} == set(straight.deviating)


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 8))
def test_pairwise_distances_equal_brute_force(seed, count):
    generator = np.random.default_rng(seed)
    held = 1e6 + generator.normal(size=(count, 3, 7)) * 10.0 ** generator.integers(-3, 3)
    if count > 2:
        held[2] = held[0]
    found = compare.pairwise_distances(held)
    for i in range(count):
        for j in range(count):
            expected = np.linalg.norm(held[i] - held[j])
            assert found[i, j] == pytest.approx(expected, rel=1e-5, abs=1e-9)
    if count > 2:
        assert found[0, 2] == 0.0


def test_norms_may_differ_by_rounding_and_not_more():
    def clusters(*values):
        found = compare.compare_values(
            1,
            "reduced_gradient",
            ranks(len(values)),
            np.array(values, float),
            tolerance=compare.NORM_TOLERANCE,
        )
        return found.clusters.tolist()

    assert clusters(3.0, 3.0, 3.0 + 1e-7) == [0, 0, 0]
    assert clusters(3.0, 3.0, 3.0 + 1e-3) == [0, 0, 1]
    assert clusters(np.nan, np.nan, np.nan) == [0, 0, 0]
    assert clusters(3.0, 3.0, np.nan) == [0, 0, 1]
    assert clusters(np.inf, 3.0, np.inf) == [0, 1, 0]
    assert clusters(0.0, 0.0, 0.0) == [0, 0, 0]
    assert clusters(0.0, 0.0, 1e-30) == [0, 0, 1]


def test_more_tensors_than_weights_do_not_confuse_the_fold():
    digests = np.arange(3 * 10_000, dtype=np.uint64).reshape(3, 10_000)
    digests[1:] = digests[0]
    digests[2, [3, 3 + 4096]] = digests[2, [3 + 4096, 3]]  # swapped
    folded = compare.fold(digests)
    assert folded[0] == folded[1]
    assert folded[0] != folded[2]


def test_two_ranks_have_a_distance():
    """Against their common median they are each other's negative."""
    sketches = np.zeros((2, 3, 4))
    sketches[1] = 0.5
    found = compare.pairwise_distances(sketches)
    assert found.tolist() == [[0.0, np.sqrt(3)], [np.sqrt(3), 0.0]]


def test_a_multiple_and_a_zero_are_distinguished_from_another_tensor():
    random = np.random.default_rng(1)
    held = np.repeat(random.standard_normal((1, TENSORS, 8)), 4, axis=0)
    held[2, 0] *= 0.25
    held[2, 1] = 0.0
    held[2, 2] += 0.01 * random.standard_normal(8)
    held[2, 3], held[2, 4] = held[2, 4].copy(), held[2, 3].copy()
    found = compare.compare_fingerprints(7, "reduced_gradient", ranks(4), fingerprints(held), TABLE)
    quarter, zero, other, first, second = found.tensors
    assert quarter.factor == pytest.approx(0.25)
    assert zero.factor == 0
    assert np.isnan(other.factor)
    assert (first.partner, second.partner) == ("t4", "t3")
    assert (quarter.partner, zero.partner, other.partner) == ("", "", "")
