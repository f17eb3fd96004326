"""What each rank counts in a reduction: weights from sketches, and what they say."""

import numpy as np
import pytest

from rankscope.server.comparison import conservation, rank_weights
from rankscope.server.comparison.compare import LabelledTable
from rankscope.server.comparison.conservation import Sums

ELEMENTS, BUCKETS = 600, 64
_RANDOM = np.random.default_rng(5)
_SIGNS = _RANDOM.choice([-1.0, 1.0], ELEMENTS)
_PLACES = _RANDOM.integers(0, BUCKETS, ELEMENTS)


def sketched(tensors):
    """Of [..., T, ELEMENTS]."""
    signed = np.asarray(tensors, np.float64) * _SIGNS
    made = np.zeros((*signed.shape[:-1], BUCKETS))
    for bucket in range(BUCKETS):
        made[..., bucket] = signed[..., bucket == _PLACES].sum(axis=-1)
    return made


def gradients(ranks, tensors=6, seed=0):
    """float32 [R, T, ELEMENTS], with a part that all ranks have in common."""
    random = np.random.default_rng(seed)
    sizes = 10.0 ** random.uniform(-3, 1, (1, tensors, 1))
    signal = random.standard_normal((1, tensors, ELEMENTS))
    noise = random.standard_normal((ranks, tensors, ELEMENTS))
    return (sizes * (signal + noise)).astype(np.float32)


def added(local, shares, dtype=np.float32):
    """One after the other, rounded each time; of a dtype of 16 bits as it is sent."""
    total = np.zeros(local.shape[1:], dtype)
    for gradient, share in zip(local, np.asarray(shares), strict=True):
        total = (total + (gradient * np.float32(share)).astype(dtype)).astype(dtype)
    return total.astype(np.float32)


def table(tensors):
    names = tuple(f"t{i}.weight" for i in range(tensors))
    return LabelledTable(names, ((20, 30),) * tensors, ("",) * tensors)


def balanced(local, reduced, dtype="float32", **more):
    tensors = local.shape[1]
    return conservation.balance(
        7,
        np.arange(len(local)),
        sketched(local),
        sketched(reduced),
        table(tensors),
        dtypes=(dtype,) * tensors,
        **more,
    )


def said(made, counts=None):
    bases = rank_weights.expected(len(made.ranks), counts or {})
    return rank_weights.meaning(np.array(made.weights), np.array(made.weight_errors), bases)


@pytest.mark.parametrize("ranks", [2, 3, 8, 64, 512])
@pytest.mark.parametrize("times", [0.0, 1.01, 2.0, -1.0])
def test_the_rank_that_counts_otherwise_is_named_with_what_it_counts(ranks, times):
    shares = np.full(ranks, 1 / ranks)
    shares[1] *= times
    local = gradients(ranks)
    found = said(balanced(local, added(local, shares)))
    assert found.how == "ranks"
    assert found.odd == {1: pytest.approx(times, abs=2e-4)}
    assert found.factor == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("ranks", [2, 4, 32, 256])
@pytest.mark.parametrize("seed", range(8))
def test_a_mean_is_one(ranks, seed):
    local = gradients(ranks, seed=seed)
    made = balanced(local, added(local, np.full(ranks, 1 / ranks)))
    assert (made.pattern, made.wrong_count, made.weighted_by) == ("", 0, "")
    assert made.ratio == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_bits_that_16_have_not_are_no_weights(seed):
    local = gradients(4, seed=seed).astype(np.float16).astype(np.float32)
    shares = np.full(4, 0.25)
    assert balanced(local, added(local, shares, np.float16), "float16").pattern == ""
    shares[2] *= 1.02
    found = said(balanced(local, added(local, shares, np.float16), "float16"))
    assert found.odd == {2: pytest.approx(1.02, abs=4e-3)}


@pytest.mark.parametrize("ranks", [4, 128, 1024])
def test_shares_of_tokens_are_right_where_they_are_known(ranks):
    tokens = np.random.default_rng(1).integers(100, 999, ranks).astype(float)
    local = gradients(ranks)
    reduced = added(local, tokens / tokens.sum())
    made = balanced(local, reduced, counts={"tokens": tokens, "samples": np.full(ranks, 8.0)})
    assert (made.pattern, made.weighted_by, made.wrong_count) == ("", "tokens", 0)
    assert made.ratio == pytest.approx(1.0, rel=1e-6)
    # Nobody knows how many it were: they are weights of their own, where these can be solved for.
    unknown = balanced(local, reduced)
    if ranks == 1024:
        assert unknown.pattern == "other"
        return
    assert said(unknown).how == "own"
    assert np.allclose(unknown.weights, tokens / tokens.sum(), rtol=1e-4)


def test_a_rank_that_is_lost_from_a_mean_by_tokens():
    tokens = np.array([100.0, 300.0, 0.0, 700.0, 250.0])
    shares = tokens / tokens.sum()
    shares[3] = 0.0
    local = gradients(5)
    counts = {"tokens": tokens}
    found = said(balanced(local, added(local, shares), counts=counts), counts)
    assert (found.how, found.by) == ("ranks", "tokens")
    assert found.odd == {3: pytest.approx(0.0, abs=1e-5)}


def test_a_node_of_more_ranks_than_there_are_equations():
    ranks = 1024
    shares = np.full(ranks, 1 / ranks)
    shares[256:512] = 0.0
    local = gradients(ranks)
    found = said(balanced(local, added(local, shares)))
    assert set(found.odd) == set(range(256, 512))
    assert all(times == pytest.approx(0.0, abs=1e-3) for times in found.odd.values())


@pytest.mark.parametrize("how", ["halves", "order", "unit"])
def test_neither_the_order_of_ranks_nor_the_unit_of_gradients_changes_weights(how):
    local = gradients(6, seed=3)
    shares = np.array([0.1, 0.2, 0.3, 0.15, 0.2, 0.05])
    reduced = added(local, shares)
    if how == "order":
        order = [3, 1, 5, 0, 4, 2]
        assert np.allclose(balanced(local[order], reduced).weights, shares[order], rtol=1e-4)
    elif how == "unit":
        made = balanced(local * np.float32(1e-20), reduced * np.float32(1e-20))
        assert np.allclose(made.weights, shares, rtol=1e-4)
    else:
        made = balanced(local[:, ::2], reduced[::2])
        assert np.allclose(made.weights, shares, rtol=1e-4)


def test_standard_errors_are_those_of_the_noise():
    random = np.random.default_rng(8)
    local = sketched(gradients(4))
    shares = np.array([0.1, 0.2, 0.3, 0.4])
    basis = local.reshape(4, -1)
    off = []
    for _ in range(300):
        noise = 1e-2 * random.standard_normal(basis.shape[1])
        found, errors = rank_weights.solve(basis, shares @ basis + noise)
        off.append((found - shares) / errors)
    assert np.std(off) == pytest.approx(1.0, abs=0.1)


def test_ranks_of_which_nothing_can_be_known_are_not_judged():
    local = gradients(4)
    local[1] = 0.0
    local[3] = local[2]
    reduced = added(local, [0.25, 0.25, 0.1, 0.4])
    made = balanced(local, reduced)
    # Two ranks with one gradient count a half together, however it is shared out.
    assert (made.pattern, made.wrong_count) == ("", 0)
    fit = rank_weights.solve(sketched(local).reshape(4, -1), sketched(reduced).ravel())
    assert np.isinf(fit[1]).tolist() == [False, True, True, True]


def test_tensors_with_weights_of_their_own_are_named_beside_the_others():
    ranks = 40  # more than a tensor has equations for
    local = gradients(ranks, tensors=8)
    shares = np.full(ranks, 1 / ranks)
    reduced = added(local, shares)
    shares[7] = 0.0
    reduced[5] = added(local, shares)[5]
    shares[7] = 3 / ranks
    reduced[2] = added(local, shares)[2]
    made = balanced(local, reduced)
    wrong = {t.name: (t.how, t.ranks, round(t.factor, 2)) for t in made.wrong}
    assert wrong == {"t5.weight": ("ranks", (7,), 0.0), "t2.weight": ("ranks", (7,), 3.0)}


def test_weights_of_all_tensors_and_one_that_is_lost():
    local = gradients(4)
    reduced = added(local, [0.25, 0.5, 0.25, 0.25])
    reduced[3] = 0.0
    made = balanced(local, reduced)
    assert said(made).odd == {1: pytest.approx(2.0, abs=1e-4)}
    assert [(t.name, t.how) for t in made.wrong] == [("t3.weight", "nothing")]


def test_every_tensor_is_that_of_another():
    local = gradients(4)
    reduced = 0.5 * added(local, np.full(4, 0.25))[::-1]
    made = balanced(local, reduced)
    assert made.ratio == pytest.approx(0.5, rel=1e-5)
    assert {t.name: t.partner for t in made.wrong} == {
        f"t{i}.weight": f"t{5 - i}.weight" for i in range(6)
    }


@pytest.mark.parametrize("lag", [1, 16])
def test_a_result_of_an_earlier_sampled_step(lag):
    local, older = gradients(4), sketched(gradients(4, seed=9)).mean(axis=0)
    before = Sums(7 - lag, older, older)
    made = conservation.balance(
        7, np.arange(4), sketched(local), 0.5 * older, table(6), before=before
    )
    assert (made.pattern, made.before) == ("stale", 7 - lag)
    assert made.weights == (pytest.approx(0.5),)


@pytest.mark.parametrize("limit", [0.5, 2.0])
def test_limits_of_single_values_are_no_weights(limit):
    for seed in range(20):
        local = gradients(4, seed=seed)
        reduced = added(local, np.full(4, 0.25))
        most = limit * np.abs(reduced).std(axis=1, keepdims=True)
        made = balanced(local, np.clip(reduced, -most, most))
        assert made.pattern in ("", "other")
        assert all(t.how == "other" for t in made.wrong)
