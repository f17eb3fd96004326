"""What ranks that disagree applied: the mean of all gradients, their own, or neither."""

import numpy as np
import pytest

from rankscope.server.comparison.applied import applied
from tests.server.comparison.test_rank_weights import ELEMENTS, gradients, sketched, table

RANKS, TENSORS = 3, 6


def found(local, came, dtype="float32"):
    return applied(sketched(local), sketched(came), table(TENSORS), dtypes=(dtype,) * TENSORS)


def reduced(local):
    return np.repeat(local.mean(axis=0)[None], len(local), axis=0)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_what_was_never_reduced_is_each_rank_s_own(ranks):
    local = gradients(ranks)
    times = np.linspace(0.5, 2.0, ranks, dtype=np.float32)[:, None, None]
    made = found(local, times * local)
    assert made.own == (TENSORS,) * ranks
    assert made.averaged == (0,) * ranks
    assert made.unreduced_count == TENSORS
    assert not made.exchanged


def test_a_tensor_that_is_left_out_is_named_though_clipping_changes_all():
    local = gradients(RANKS)
    came = reduced(local)
    came[:, 2] = local[:, 2]
    coefficients = np.array([0.5, 0.45, 0.6], dtype=np.float32)
    made = found(local, coefficients[:, None, None] * came)
    assert made.unreduced == ("t2.weight",)
    assert made.averaged == (TENSORS - 1,) * RANKS
    assert made.factors == pytest.approx(coefficients, rel=1e-4)
    assert made.exchanged
    assert made.changed == ()


def test_noise_on_one_rank_does_not_hide_the_reduction():
    local = gradients(RANKS)
    came = reduced(local)
    random = np.random.default_rng(1)
    size = np.abs(came[1]).mean(axis=1, keepdims=True)
    came[1] += 0.5 * size * random.standard_normal((TENSORS, ELEMENTS))
    made = found(local, came)
    assert made.averaged == (TENSORS, 0, TENSORS)
    assert made.own == (0, 0, 0)
    assert made.received == (True, True, True)
    assert made.rest[0] < 1e-5 < 0.1 < made.rest[1] < 1.0


@pytest.mark.parametrize("change", ["noise", "clipped by value"])
def test_what_a_rank_makes_of_its_own_gradient_is_no_exchange(change):
    local = gradients(RANKS)
    random = np.random.default_rng(1)
    sizes = np.abs(local).mean(axis=(0, 2), keepdims=True)
    if change == "noise":
        came = local + 0.5 * sizes * random.standard_normal(local.shape)
    else:
        came = np.clip(local, -0.5 * sizes, 0.5 * sizes)
    made = found(local, came)
    assert not made.exchanged
    assert made.own == (0,) * RANKS


def test_gradients_of_halves_are_multiples_as_far_as_they_are_known():
    local = gradients(RANKS).astype(np.float16).astype(np.float32)
    came = reduced(local).astype(np.float16).astype(np.float32)
    came[2] *= 0.5
    made = found(local, came, "float16")
    assert made.averaged == (TENSORS,) * RANKS
    assert made.factors == pytest.approx([1.0, 1.0, 0.5], rel=1e-2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_numbers_that_travelled_in_fewer_bits_are_the_mean_as_far_as_one_rank_shows_it(ranks):
    """As a hook of one's own sends them, of which nothing is known here."""
    local = gradients(ranks)
    sent = local.astype(np.float16).astype(np.float32)
    came = (reduced(sent) * ranks).astype(np.float16).astype(np.float32) / ranks
    came[0, :2] = local[0, :2]
    made = found(local, came)
    assert made.averaged == (TENSORS - 2, *(TENSORS,) * (ranks - 1))
    assert made.own == (2, *(0,) * (ranks - 1))
    came[0, :2] = came[1, :2] * 2 / 3
    made = found(local, came)
    assert made.averaged == (TENSORS,) * ranks
    assert np.isnan(made.factors[0])
    assert made.factors[1:] == pytest.approx([1.0] * (ranks - 1), rel=1e-3)


@pytest.mark.parametrize("size", [1e-3, 1e-2])
def test_noise_on_all_ranks_is_no_rounding_of_the_mean(size):
    local = gradients(RANKS)
    came = reduced(local)
    random = np.random.default_rng(1)
    came += size * np.abs(came).mean() * random.standard_normal(came.shape)
    made = found(local, came)
    assert made.averaged == made.own == (0,) * RANKS
    assert min(made.rest) > 0.3 * size


def test_nothing_is_said_of_single_numbers_and_of_zeros():
    local = gradients(RANKS)
    scalars = table(TENSORS)
    scalars = type(scalars)(scalars.names, ((1,),) * TENSORS, scalars.tables)
    assert applied(sketched(local), sketched(local), scalars) is None
    assert found(0 * local, 0 * local) is None


def test_a_rank_that_applies_the_mean_of_the_step_before():
    local = gradients(RANKS)
    before = np.ascontiguousarray(local[:, :, ::-1])  # other ones of the same sizes
    came = reduced(local)
    came[1] = before.mean(axis=0)
    known = sketched(before).mean(axis=0)
    types = ("float32",) * TENSORS
    made = applied(sketched(local), sketched(came), table(TENSORS), dtypes=types, before=known)
    assert made.stale == (0, TENSORS, 0)
    assert made.averaged == (TENSORS, 0, TENSORS)
    said = applied(sketched(local), sketched(came), table(TENSORS), dtypes=types)
    assert said.stale == (0, 0, 0)


@pytest.mark.parametrize("ranks", [3, 8])
def test_means_of_neighbours_name_these(ranks):
    local = gradients(ranks)
    came = (local + np.roll(local, 1, axis=0)) / 2
    made = found(local, came)
    assert made.averaged == made.own == (0,) * ranks
    assert made.subsets == tuple(tuple(sorted(((i - 1) % ranks, i))) for i in range(ranks))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_reduction_without_one_rank_names_the_others(dtype):
    local = gradients(4)
    came = np.repeat(local[:3].mean(axis=0)[None], 4, axis=0)
    came[3] = local[3]
    made = found(local, came, dtype)
    assert made.subsets == ((0, 1, 2),) * 3 + ((),)
    assert made.own == (0, 0, 0, TENSORS)


@pytest.mark.parametrize("kind", ["mean of all", "own", "noise", "weighted"])
def test_what_is_no_mean_of_some_names_none(kind):
    local = gradients(4)
    random = np.random.default_rng(2)
    came = {
        "mean of all": reduced(local),
        "own": local,
        "noise": reduced(local[:2])[[0, 0, 0, 0]] + 0.01 * random.standard_normal(local.shape),
        "weighted": np.repeat((local[0] + 2 * local[1])[None] / 3, 4, axis=0),
    }[kind]
    assert not any(found(local, came.astype(np.float32)).subsets)
