"""How many samples are behind a step's loss."""

import math

import numpy as np
import pytest

from rankscope.server.detectors.mechanisms.batch_sizes import BatchSizes, effective_sizes
from rankscope.server.window import Series, Window


def window(present=None, **series):
    made = {
        name: Series(np.array(rows), np.array(present or ~np.isnan(rows)))
        for name, rows in ((name, np.array(rows, dtype=float)) for name, rows in series.items())
    }
    ranks, steps = next(iter(made.values())).values.shape
    return Window(world_size=ranks, ranks=np.arange(ranks), steps=np.arange(steps), series=made)


def test_rate_times_seconds_is_the_number_of_samples_at_every_step():
    seconds = np.array([[0.0043, 0.0051, 0.3], [0.0041, 0.0057, 0.2]])
    made = window(
        loss=np.ones((2, 3)), step_seconds=seconds, samples_per_second=[[16], [16]] / seconds
    )
    assert effective_sizes(made, "loss").tolist() == [16, 16, 16]


def test_what_is_reported_counts_for_more_than_what_is_computed():
    made = window(
        loss=np.ones((1, 2)),
        samples=[[8, math.nan]],
        step_seconds=np.ones((1, 2)),
        samples_per_second=[[5, 5]],
    )
    assert effective_sizes(made, "loss").tolist() == [8, 5]


def test_ranks_with_few_samples_count_as_their_part_of_the_scatter_does():
    made = window(loss=np.ones((2, 1)), samples=[[1], [16]])
    # Of the mean of two ranks' means: (1/1 + 1/16) / 4 is 1/n/2 for n = 1.88.
    assert effective_sizes(made, "loss")[0] == pytest.approx(2 / (1 + 1 / 16))


def test_only_ranks_that_posted_the_loss_count_and_steps_without_one_are_left_out():
    made = window(
        loss=[[1.0, math.nan, 1.0], [math.nan, math.nan, 1.0]], samples=[[4, 4, 4], [2, 2, 4]]
    )
    assert effective_sizes(made, "loss").tolist() == [4, 4]
    assert effective_sizes(made, "accuracy").tolist() == []


@pytest.mark.parametrize("seconds", [0.0, math.inf, math.nan, -1.0])
def test_a_size_that_is_none_is_not_known(seconds):
    made = window(
        present=[[True]], loss=[[1.0]], step_seconds=[[seconds]], samples_per_second=[[8.0]]
    )
    assert np.isnan(effective_sizes(made, "loss")).all()


def test_scatter_goes_with_the_root_of_the_number():
    sizes = BatchSizes()
    for size in [64.0] * 9 + [math.nan]:
        sizes.push(size)
    assert (sizes.usual, sizes.widening(4), sizes.widening(256)) == (64, 4.0, 1.0)
    assert sizes.widening(math.nan) == 1.0


def test_a_smaller_batch_is_the_usual_one_once_most_are_so_small():
    sizes = BatchSizes()
    for size in [64.0] * 64 + [16.0] * 33:
        sizes.push(size)
    assert sizes.widening(16) == 1.0
