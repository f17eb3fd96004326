"""Two runs: which settings differ, in which order, and how their courses compare."""

import math

import numpy as np
import pytest

from rankscope.server.comparison import between_runs, configurations, courses
from rankscope.server.window import FingerprintKey


def test_settings_that_matter_come_first_and_equal_ones_are_counted():
    one = {"torch": "2.1", "parameter_groups": [{"lr": 0.1}], "seed": 1, "a": [], "n": 1, "gone": 2}
    other = {"torch": "2.2", "parameter_groups": [{"lr": 0.2}], "seed": 2, "a": [], "n": 1.0}
    differing, equal = configurations.differences([one, other])
    assert [(s.key, s.values) for s in differing] == [
        ("seed", (1, 2)),
        ("parameter_groups.0.lr", (0.1, 0.2)),
        ("torch", ("2.1", "2.2")),
        ("gone", (2, None)),
    ]
    assert equal == 2
    assert configurations.seeds({"data": {"Seed": 3, "x": 1}, "seeds_of": 1}) == {
        "data.Seed": 3,
        "seeds_of": 1,
    }


def test_true_is_not_one():
    differing, _ = configurations.differences([{"a": True}, {"a": 1}])
    assert [s.key for s in differing] == ["a"]


def digests(**of):
    """Digests of rank 0: link -> {step: digest}."""
    return {
        (stage, 0): (np.array(list(held)), np.array(list(held.values()), np.uint64))
        for stage, held in of.items()
    }


def test_the_first_link_of_the_first_step_is_named():
    one = digests(parameters={0: 1, 1: 2, 3: 3}, batch={0: 5, 3: 6}, hyperparameters={7: 1})
    other = digests(parameters={0: 1, 2: 9, 3: 4}, batch={0: 5, 3: 7}, start={0: 1})
    found, met = between_runs.first_of_digests(one, other)
    assert (found.step, found.stage, found.ranks) == (3, "batch", (0,))
    assert met.steps.tolist() == [0, 3]
    assert between_runs.first_of_digests(one, {})[0] is None
    keys = [FingerprintKey(1, "parameters", 1), FingerprintKey(1, "local_gradient", 0)]
    assert between_runs.in_order([*keys, FingerprintKey(0, "parameters", 2)]) == [
        (0, "parameters", [2]),
        (1, "local_gradient", [0]),
        (1, "parameters", [1]),
    ]


def course(steps, values):
    return courses.Course(np.array(steps), np.array(values, float))


def test_courses_are_compared_at_equal_steps():
    apart = courses.compared(
        course([0, 1, 2, 4], [1, math.nan, 3, 4]), course([0, 1, 2, 3, 4], [1, math.nan, 5, 0, 4])
    )
    assert (apart.steps, apart.first, apart.last, apart.at_last) == (4, 0, 4, (4.0, 4.0))
    assert (apart.first_differing, apart.largest, apart.at_largest) == (2, 2, (3.0, 5.0))
    assert apart.mean_difference == pytest.approx(2 / 3)
    none = courses.compared(course([0], [1]), course([1], [1]))
    assert (none.steps, none.first, none.at_last, none.first_differing) == (0, None, None, None)
    assert math.isnan(none.mean_difference)


def test_a_rank_that_is_lost_on_the_way_does_not_end_the_course():
    each = np.arange(1000)
    lost = (each[:100], np.full(100, 5.0))
    mean = courses.mean_over_ranks([(each, np.ones(1000)), (each, 3 * np.ones(1000)), lost])
    assert (mean.steps[0], mean.steps[-1], len(mean.steps)) == (0, 999, 1000)
    assert (mean.values == 2.0).all()
    # Ranks of a job that was killed end some steps apart.
    killed = courses.mean_over_ranks([(each, np.ones(1000)), (each[:950], 3 * np.ones(950))])
    assert (len(killed.steps), killed.values[0]) == (950, 2.0)


def test_a_mean_over_ranks_leaves_out_steps_at_which_one_is_missing():
    mean = courses.mean_over_ranks(
        [(np.array([0, 1, 2]), np.array([1.0, 2, 3])), (np.array([0, 2]), np.array([3.0, 5]))]
    )
    assert (mean.steps.tolist(), mean.values.tolist()) == ([0, 2], [2.0, 4.0])
    wide = courses.in_buckets(course([0, 1, 2, 5], [1, 3, 5, 7]), 2)
    assert (wide.steps.tolist(), wide.values.tolist()) == ([0, 2, 4], [2.0, 5.0, 7.0])
