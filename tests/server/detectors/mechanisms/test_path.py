"""How far the steps of a run have moved its parameters."""

import pytest

from rankscope.server.detectors.mechanisms.path import Path


def walked(steps):
    path = Path()
    for step in steps:
        path.push(step, 0.5)
    return path


@pytest.mark.parametrize(
    ("steps", "length"), [(range(4), 2.0), ((0, 1, 4), 2.5), ((100, 101), 1.0), ((0, 8), 4.5)]
)
def test_a_sample_stands_for_the_steps_since_the_one_before(steps, length):
    path = walked(steps)
    assert path.length == length
    assert path.steps == 2 * length


@pytest.mark.parametrize(
    ("steps", "at", "fresh"),
    [
        (range(8), 207, True),
        (range(8), 208, False),  # dense at first, and then no more
        (range(0, 2049, 256), 4000, True),  # the next one is due
        (range(0, 2049, 256), 5000, False),
    ],
)
def test_samples_of_a_warm_up_say_nothing_of_what_comes_long_after(steps, at, fresh):
    assert walked(steps).fresh(at, 200) is fresh
