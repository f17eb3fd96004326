"""Where gradients point beside each other, from sketches."""

import numpy as np
import pytest

from rankscope.server.comparison import directions


def test_of_two_ranks_it_is_their_cosine():
    one = np.array([[3.0, 4.0], [0.0, 0.0]])
    other = np.array([[4.0, -3.0], [1.0, 0.0]])
    made = directions.of_gradients(5, np.array([0, 1]), np.stack([one, -one]))
    assert made.cosines.tolist() == pytest.approx([-1.0, -1.0])
    made = directions.of_gradients(5, np.array([0, 1]), np.stack([one, other]))
    assert made.cosines.tolist() == pytest.approx([0.0, 0.0])
    assert made.squares.tolist() == pytest.approx([25.0, 26.0])


def test_a_rank_is_held_against_the_mean_of_the_others():
    random = np.random.default_rng(0)
    sketches = random.standard_normal((4, 3, 64))
    made = directions.of_gradients(5, np.arange(4), sketches)
    others = sketches[[0, 1, 3]].mean(axis=0)
    assert made.products[2] == pytest.approx(float((sketches[2] * others).sum()))
    assert made.others[2] == pytest.approx(float((others**2).sum()))


def test_a_tensor_that_one_rank_lacks_counts_for_none():
    sketches = np.ones((2, 2, 4))
    sketches[0, 1] = np.nan
    made = directions.of_gradients(5, np.array([0, 1]), sketches)
    assert made.squares.tolist() == [4.0, 4.0]
    assert made.cosines.tolist() == pytest.approx([1.0, 1.0])
