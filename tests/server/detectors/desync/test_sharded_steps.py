"""Ranks of a sharded model, each of which decides for itself whether to step."""

from dataclasses import replace

import numpy as np
import pytest

from rankscope.server.detectors.desync.progress import Progress
from rankscope.server.detectors.desync.sharded_steps import ShardedSteps
from tests.support.runs.compared import run

STEPS = 40


def windows(thrown, *, parts=None, sampled=None, cuts=()):
    """A run of ranks over which FSDP deals a model out.

    Args:
        thrown: rank -> step -> passes thrown away before it.
        parts: sets of ranks that hold the same parts; by default no two do.
        sampled: ranks that report what they did with their passes; by default all.
    """
    ranks = len(thrown)
    discarded = np.full((ranks, STEPS), np.nan)
    for rank, of_rank in enumerate(thrown):
        for step, count in of_rank.items():
            discarded[rank, step] = count
    passes = np.ones((ranks, STEPS))
    for rank in set(range(ranks)) - set(range(ranks) if sampled is None else sampled):
        passes[rank] = np.nan
    dealt = {"sharded_over": {"first": 0, "step": 1, "count": ranks}}
    for window in run([], ranks=ranks, passes_discarded=discarded, micro_steps=passes).windows(
        cuts
    ):
        yield replace(
            window,
            classes=parts or tuple((rank,) for rank in range(ranks)),
            configs=dict.fromkeys(range(ranks), dealt),
        )


def found(thrown, **options):
    shards = ShardedSteps()
    return [
        (step, mismatch.suspects, mismatch.decided)
        for window in windows(thrown, **options)
        for step, mismatch in shards.take(window)
    ]


@pytest.mark.parametrize("cuts", [(), range(0, STEPS, 7)], ids=["one", "many"])
@pytest.mark.parametrize(
    ("thrown", "expected"),
    [
        (({}, {15: 1}), (15, (1,), True)),
        (({16: 1}, {15: 1, 20: 2}), (15, (1,), True)),
        (({15: 1}, {15: 2}, {15: 1}), (15, (1,), True)),
        (({}, {15: 1}, {15: 1}), (15, (0, 1, 2), False)),
    ],
)
def test_the_first_step_at_which_ranks_threw_away_what_others_stepped_with(thrown, expected, cuts):
    assert found(thrown, cuts=cuts) == [expected]


@pytest.mark.parametrize(
    "healthy",
    [
        {"thrown": ({15: 1}, {15: 1})},  # an overflow that both have seen
        {"thrown": ({}, {15: 1}), "sampled": [1]},
        {"thrown": ({}, {15: 1}), "parts": ((0, 1),)},  # copies: what they hold shows it
    ],
)
def test_what_is_no_sign_of_it(healthy):
    assert found(healthy.pop("thrown"), **healthy) == []


def test_what_is_reported():
    detector = Progress()
    (window,) = windows(({}, {15: 1}))
    (finding,) = detector.advance(window, detector.start()).findings
    assert (finding.kind, finding.severity, finding.ranks) == ("desync.progress", "critical", (1,))
    assert finding.first_step == 15
    assert "the parts of the model are of different steps" in finding.cause
