"""Ranks that have taken a step more or less than the others: what shows it, and whose it was."""

from dataclasses import replace

import numpy as np
import pytest

from rankscope.server.detectors.desync.progress import Progress
from tests.support.judging import judge
from tests.support.runs.compared import differing, equal, run


@pytest.mark.parametrize("begins", [(32, 32), (32, 16)])
def test_ranks_that_go_on_without_others_began_at_one_step(begins):
    (window,) = run([]).windows()
    window = replace(
        window,
        world_size=2,
        begins={0: (0, begins[0]), 1: (0, begins[1]), 2: (0,), 3: (0,)},
    )
    detector = Progress()
    findings = detector.advance(window, detector.start()).findings
    assert [(f.ranks, f.first_step) for f in findings] == ([((0, 1), 16)] if 16 in begins else [])


def discarding(step, rank, *, ranks=2, steps=60):
    thrown = np.full((ranks, steps), np.nan)
    thrown[rank, step] = 1.0
    return thrown


def diverged(since, *, ranks=2, every=8):
    clusters = [*[0] * (ranks - 1), 1]
    for step in range(0, 60, every):
        for stage in ("reduced_gradient", "parameters"):
            yield equal(step, stage, ranks) if step < since else differing(step, stage, clusters)


def test_a_gradient_thrown_away_on_one_rank_shows_the_step_that_it_left_out():
    made = run(diverged(30), ranks=2, passes_discarded=discarding(29, 1))
    for cuts in ((), range(60)):
        (alert,) = judge(made, [Progress()], cuts).alerts
        assert (alert.kind, alert.severity) == ("desync.progress", "critical")
        assert (alert.ranks, alert.first_step, alert.seen_step) == ((1,), 29, 32)
        assert "threw it away" in alert.cause


def test_what_shows_it_first_opens_the_alert_however_the_steps_are_cut():
    norms = np.tile(1.0 + 0.01 * np.arange(61), (4, 1))
    applied = norms[:, :60].copy()
    applied[1, 29:] = norms[1, 30:]  # a step ahead of what it has not taken
    samples = [
        c if c.step < 29 else differing(c.step, c.stage, [0, 1, 0, 0])
        for c in diverged(30, ranks=4, every=1)
    ]
    thrown = discarding(29, 1, ranks=4)
    made = run(samples, ranks=4, grad_norm=applied, passes_discarded=thrown)
    found = {
        (a.id, a.ranks, a.first_step, a.seen_step)
        for cuts in ((), range(60), (30,), (31,))
        for a in judge(made, [Progress()], cuts).alerts
    }
    ((_, ranks, first, seen),) = found
    assert (ranks, first, seen) == ((1,), 29, 29)


def test_a_gradient_thrown_away_by_ranks_that_stay_equal_is_none_left_out():
    assert not judge(
        run(diverged(99), passes_discarded=discarding(29, 1), ranks=2), [Progress()]
    ).of("desync.progress")


def test_nor_is_one_that_all_ranks_threw_away():
    thrown = discarding(29, 1)
    thrown[0, 29] = 1.0
    assert not judge(run(diverged(30), passes_discarded=thrown, ranks=2), [Progress()]).alerts


def test_more_thrown_away_than_by_the_others_shows_it_where_all_throw_some_away():
    """Of two networks that play against each other, each step gives the other one a gradient."""
    thrown = np.ones((2, 60))
    thrown[1, 29] = 3.0
    (alert,) = judge(run(diverged(30), passes_discarded=thrown, ranks=2), [Progress()]).alerts
    assert (alert.ranks, alert.first_step) == ((1,), 29)
    assert "threw away 3 gradients that it had computed, the others 1," in alert.cause


def test_nor_one_of_ranks_that_differed_before():
    assert not judge(
        run(diverged(20), passes_discarded=discarding(29, 1), ranks=2), [Progress()]
    ).alerts


def norms_of_ranks(ranks, *, extra, rank):
    """Norms of gradients that a rank applies a step later than the others from `extra` on."""
    common = 1 + np.random.default_rng(3).random(61)
    norms = np.tile(common[:60], (ranks, 1))
    norms[rank, extra:] = common[extra - 1 : 59]
    return norms


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_steps_twice_with_one_gradient_has_taken_a_step_more(ranks):
    passes = np.ones((ranks, 60))
    passes[1, 30] = np.nan
    made = run(
        (), ranks=ranks, grad_norm=norms_of_ranks(ranks, extra=30, rank=1), micro_steps=passes
    )
    (alert,) = judge(made, [Progress()]).alerts
    assert (alert.kind, alert.ranks, alert.first_step) == ("desync.progress", (1,), 30)
    assert alert.title == "Rank 1 took one step more than the others, at step 30"
    assert "called twice" in alert.cause


def test_a_rank_that_applies_old_gradients_but_computes_its_own_takes_the_same_steps():
    norms = norms_of_ranks(4, extra=30, rank=1)
    made = run((), grad_norm=norms, micro_steps=np.ones((4, 60)))
    assert judge(made, [Progress()]).alerts == ()


def test_a_step_without_a_pass_after_which_all_is_as_before_is_nothing():
    norms, passes = norms_of_ranks(4, extra=60, rank=1), np.ones((4, 60))
    passes[1, 30] = np.nan
    assert judge(run((), grad_norm=norms, micro_steps=passes), [Progress()]).alerts == ()
