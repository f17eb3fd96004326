"""Ranks that add up other numbers of micro-batches, or divide their losses by another number."""

import numpy as np
import pytest

from rankscope.server.detectors.data.imbalanced import Imbalanced
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 120


def counted(ranks=3, *, passes=None, divisors=None, samples=None):
    """A run of two micro-batches a step; what is given changes the arrays, [R, N], in place."""
    series = {
        "loss": np.ones((ranks, STEPS)),
        "micro_steps": np.full((ranks, STEPS), 2.0),
        "loss_divisor": np.full((ranks, STEPS), 2.0),
        "samples": np.full((ranks, STEPS), 32.0),
    }
    for name, change in (
        ("micro_steps", passes),
        ("loss_divisor", divisors),
        ("samples", samples),
    ):
        if change is not None:
            change(series[name])
    return Trace("counted", 0, np.arange(STEPS), series)


def found(trace):
    alerts = judge(trace, [Imbalanced()]).alerts
    return [(a.key, a.severity, a.ranks, a.first_step, a.evidence.get("times")) for a in alerts]


def set_from(rank, step, value, every=1):
    def change(values):
        values[rank, step::every] = value

    return change


@pytest.mark.parametrize("ranks", [2, 3])
def test_one_micro_batch_too_many(ranks):
    trace = counted(ranks, passes=set_from(1, 40, 3.0))
    assert found(trace) == [("passes", "warning", (1,), 40, 1.5)]


def test_one_too_few_at_every_second_step():
    assert found(counted(2, passes=set_from(0, 40, 1.0, every=2))) == [
        ("passes", "warning", (0,), 40, 0.5)
    ]


def test_a_loss_that_is_not_divided():
    assert found(counted(2, divisors=set_from(1, 50, 1.0))) == [
        ("passes", "warning", (1,), 50, 2.0)
    ]


def test_a_rank_that_has_never_divided():
    # It posts no divisor.
    assert found(counted(3, divisors=set_from(2, 0, np.nan))) == [
        ("passes", "warning", (2,), 0, 2.0)
    ]


def test_of_two_ranks_that_never_agreed_both_are_named():
    (one,) = found(counted(2, divisors=set_from(1, 0, 4.0)))
    assert one[:4] == ("passes", "warning", (0, 1), 0)


def test_each_rank_divides_by_as_many_as_it_has():
    trace = counted(2, passes=set_from(1, 40, 3.0), divisors=set_from(1, 40, 3.0))
    assert found(trace) == []


def test_a_shorter_last_group_of_each_epoch():
    assert found(counted(3, passes=set_from(1, 11, 1.0, every=12))) == []


def test_batches_of_tokens_have_as_many_micro_batches_as_they_need():
    random = np.random.default_rng(3)

    def change(values):
        values[:] = random.integers(1, 4, values.shape)

    assert found(counted(3, passes=change)) == []


def test_ranks_that_count_by_their_samples_and_one_on_average():
    # As where a mean is multiplied by its samples over those of all ranks, times their number.
    def sizes(values):
        values[0], values[1] = 32.0, 48.0

    def divisors(values):
        values[0], values[1] = 2 * 1.25, 2 * 0.8333333

    assert found(counted(2, samples=sizes, divisors=divisors)) == []


def test_sums_over_elements_are_not_judged():
    trace = counted(2, passes=set_from(1, 0, 4.0))
    trace.series["losses_summed"] = np.ones((2, STEPS))
    assert found(trace) == []


def test_many_more_are_told_once():
    def sizes(values):
        values[1, 40:] = 128.0

    trace = counted(2, passes=set_from(1, 40, 8.0), samples=sizes)
    assert found(trace) == [("passes", "warning", (1,), 40, 4.0)]


def test_another_rank_with_smaller_batches_is_told_beside_it():
    def sizes(values):
        values[2] = 8.0

    def passes(values):
        values[1, 60:] = 3.0

    kinds = [(a[0], a[2]) for a in found(counted(4, passes=passes, samples=sizes))]
    assert sorted(kinds) == [("", (2,)), ("passes", (1,))]
