"""Reductions of which rounding alone is left, and faults of gradients as small as can be."""

import numpy as np
import pytest

from tests.server.comparison.test_rank_weights import added, balanced, gradients, said


def vanished(size):
    """Of two ranks; the second half of the tensors is this small."""
    local = gradients(2)
    local[:, 3:] *= np.float32(size) / np.abs(local[:, 3:]).max()
    return local


@pytest.mark.parametrize("size", [1e-36, 1e-39, 1e-42, 3e-45])
@pytest.mark.parametrize("flushed", [False, True])
def test_a_gradient_below_the_smallest_normal_number_shows_nothing(size, flushed):
    local = vanished(size)
    reduced = added(local, [0.5, 0.5])
    if flushed:
        reduced[np.abs(reduced) < np.finfo(np.float32).tiny] = 0.0
    made = balanced(local, reduced)
    assert (made.known, made.wrong_count) == (3, 0)
    assert made.ratio == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("shares", [(0.5, 0.0), (0.5, 0.6), (1.0, 1.0)])
def test_one_above_it_is_held_to_the_mean(shares):
    local = vanished(1e-25)
    reduced = added(local, [0.5, 0.5])
    reduced[4:] = added(local, shares)[4:]
    made = balanced(local, reduced)
    assert (made.known, made.wrong_count) == (6, 2)


def test_what_comes_of_it_and_should_not_is_wrong():
    local = vanished(1e-42)
    reduced = added(local, [0.5, 0.5])
    reduced[4] = 0.01
    assert [t.name for t in balanced(local, reduced).wrong] == ["t4.weight"]


def cancelling(left):
    """Two ranks whose gradients cancel but for a share, and what an uneven sum makes of them."""
    local = gradients(2)
    local[1] = -local[0] + np.float32(left) * local[1]
    # Each rank adds up two micro-batches that were reduced one by one.
    parts = np.random.default_rng(1).standard_normal(local.shape).astype(np.float32)
    first = added(local * parts, [0.5, 0.5])
    return local, first + added(local - local * parts, [0.5, 0.5])


@pytest.mark.parametrize("left", [0.0, 1e-8, 1e-7])
def test_gradients_that_cancel_show_nothing(left):
    made = balanced(*cancelling(left))
    assert (made.known, made.pattern, made.wrong_count) == (0, "", 0)


def test_where_one_is_left_out_the_other_shows_it():
    local, _ = cancelling(1e-2)
    found = said(balanced(local, added(local, [0.5, 0.0])))
    assert (found.how, found.odd) == ("ranks", {1: pytest.approx(0.0, abs=1e-4)})


def test_what_has_not_cancelled_is_judged():
    made = balanced(*cancelling(1e-3))
    assert (made.known, made.wrong_count) == (6, 0)
