"""One rank that stops being like the others: how small a change is found, and what is none."""

import numpy as np
import pytest

from rankscope.server.detectors.mechanisms.peers import Change, PeerChange, either_way
from rankscope.server.detectors.mechanisms.statistics import known_median

STEPS, SIGMA = 160, 0.1


def noise(seed, ranks, steps=STEPS, sigma=SIGMA):
    """Losses that fall and scatter, float64 [R, S]."""
    draw = np.random.default_rng(seed)
    return np.exp(-np.arange(steps) / 200 + sigma * draw.standard_normal((ranks, steps)))


def changes(values):
    followed = PeerChange(np.arange(len(values)))
    return [c for step in range(values.shape[1]) for c in followed.push(step, values[:, step])]


@pytest.mark.parametrize("ranks", [2, 3, 4, 100])
@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_moves_for_good_is_named_with_its_step(ranks, seed):
    values = noise(seed, ranks)
    values[1, 90:] *= np.exp(6 * SIGMA)
    first, *_ = changes(values)
    assert first.ranks in ({(1,)} if ranks > 2 else {(1,), (0, 1)})
    assert 86 <= first.first_step <= 94
    assert first.seen_step < 130
    assert 0.3 * 6 * SIGMA < abs(first.size) < 1.6 * 6 * SIGMA


@pytest.mark.parametrize("ranks", [3, 4, 100])
@pytest.mark.parametrize("every", [2, 3, 4])
def test_single_values_that_come_again_are_named(ranks, every):
    values = noise(7, ranks)
    values[2, 80::every] *= 4
    first, *_ = changes(values)
    assert first.ranks == (2,)
    assert 80 <= first.first_step <= 80 + every
    assert first.seen_step < 140


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
def test_healthy_ranks_are_let_alone(ranks):
    tails = np.random.default_rng(ranks)
    # As many values of ranks or more, whatever their number is.
    for seed in range(20 if ranks < 8 else 8):
        assert changes(noise(seed, ranks, 400)) == []
        heavy = np.exp(0.1 * tails.standard_t(3, (ranks, 400)))
        assert changes(heavy) == []


def test_scatter_that_grows_on_all_ranks_is_none_of_one():
    for seed in range(20):
        draw = np.random.default_rng(seed)
        sigma = np.linspace(0.02, 0.6, 400)
        assert changes(np.exp(sigma * draw.standard_normal((3, 400)))) == []


def test_ranks_that_are_unlike_from_the_start_and_wander_are_let_alone():
    for seed in range(20):
        draw = np.random.default_rng(seed)
        own = 0.3 * draw.standard_normal((4, 1)) + np.cumsum(
            0.01 * draw.standard_normal((4, 400)), axis=1
        )
        assert changes(np.exp(own + 0.1 * draw.standard_normal((4, 400)))) == []


def test_where_all_ranks_move_none_is_suspect():
    values = noise(3, 4)
    values[:, 80:] *= 10
    assert changes(values) == []


def test_a_rank_that_is_missing_now_and_then_is_followed_all_the_same():
    values = noise(4, 3)
    values[1, 90:] *= 2
    values[0, ::5] = np.nan
    first, *_ = changes(values)
    assert (first.question, first.ranks) == ("shift", (1,))


@pytest.mark.parametrize("away", [slice(0, 40), slice(30, 62), slice(0, 70)])
def test_a_rank_that_was_not_there_for_long_hides_no_other(away):
    """And nothing warns: a stretch in which it has no value at all has no median."""
    values = noise(4, 4, 240)
    values[1, 160:] *= 2
    values[0, away] = np.nan
    first, *_ = changes(values)
    assert (first.question, first.ranks) == ("shift", (1,))
    assert 156 <= first.first_step <= 164


def test_steps_of_which_every_rank_is_missing_are_let_alone():
    values = noise(5, 3, 240)
    values[:, 40:80] = np.nan
    values[1, 10:40] = np.inf
    values[:2, 120:200] = np.nan
    assert changes(values) == []


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_median_of_what_is_known_is_that_of_the_rest(axis):
    draw = np.random.default_rng(axis)
    values = draw.standard_normal((3, 4, 5))
    whole = np.median(values, axis=axis)
    assert np.array_equal(known_median(values, axis), whole)
    gone = np.zeros(values.shape, dtype=bool)
    np.moveaxis(gone, axis, 0)[:, 1, 2] = True
    np.moveaxis(gone, axis, 0)[0, 0, 0] = True
    found = known_median(np.where(gone, np.nan, values), axis)
    assert np.isnan(found[1, 2])
    assert np.isnan(found).sum() == 1
    assert found[0, 0] == np.median(np.moveaxis(values, axis, 0)[1:, 0, 0])
    assert np.isnan(known_median(np.full(3, np.nan)))


def test_a_few_close_values_of_one_rank_are_no_measure_where_all_have_come_to_scatter():
    """Local gradients of a network with batch norm, seen in a healthy job of four ranks."""
    random = np.random.default_rng(3)
    fired = 0
    for _ in range(40):
        spread = np.where(np.arange(64) < 20, 0.1, 0.7)[:, None]
        logs = spread * random.standard_normal((64, 4))
        fired += bool(changes(logs))
    assert fired == 0


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("seed", range(6))
def test_a_rank_that_is_learned_better_by_and_by_has_no_recurring_values(ranks, seed):
    """As of a small shard: the whole of its losses moves, and scatters more."""
    values = noise(seed, ranks)
    ramp = np.clip((np.arange(STEPS) - 40) / 60, 0, 1)
    values[1] *= np.exp(0.25 * ramp * (np.random.default_rng(seed).standard_normal(STEPS) - 1))
    assert not [change for change in changes(values) if change.question == "recurring"]


@pytest.mark.parametrize(("also", "found"), [(0.1, True), (0.0, False)])
def test_wrong_labels_here_and_there_are_no_rank_s(also, found):
    """Of two ranks one stands out, and the other, perhaps, as well."""
    values, draw = noise(3, 2).T, np.random.default_rng(3)
    values[draw.random(STEPS) < 0.1, 1] *= 3
    values[draw.random(STEPS) < also, 0] *= 3
    change = Change("recurring", (1,), 80, 120, size=1.0, z=2.0, count=12)
    assert either_way(values, np.arange(2), change) == found
