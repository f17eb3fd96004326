"""Buffers of which each rank has its own: which are worth a note, and which are a fault."""

from dataclasses import replace

import numpy as np
import pytest

from rankscope.server.alerts.onset import since
from rankscope.server.detectors.desync.buffers import Buffers
from rankscope.server.window import TensorDifference
from tests.support.judging import judge
from tests.support.runs.compared import differing, equal, of_ranks, run


def buffer(name, distance, relative=0.02):
    return TensorDifference(name, (8,), (1,), distance, relative, 8, "buffers")


def statistics(step, clusters, distance, variance=0.02):
    tensors = [buffer("bn.running_mean", distance), buffer("bn.running_var", distance, variance)]
    return differing(step, "buffers", clusters, tensors, of=3)


def severity_of(samples):
    (alert,) = judge(run(samples, ranks=len(samples[0].ranks)), [Buffers()]).alerts
    return alert.severity, alert.evidence["harm"]


def test_statistics_of_each_ranks_own_batches_are_worth_a_note():
    samples = [statistics(step, [0, 1, 2, 3], 0.1 + 0.01 * step) for step in range(40)]
    assert severity_of(samples) == ("info", "")


def test_statistics_that_most_ranks_share_are_not_of_own_batches():
    samples = [equal(20, "buffers"), statistics(30, [0, 0, 1, 0], 0.1)]
    assert severity_of(samples) == ("warning", "minority")


def test_other_buffers_may_be_one_ranks_own():
    counter = TensorDifference("seen", (1,), (2,), 1.0, 1.0, 1, "buffers")
    assert severity_of([differing(30, "buffers", [0, 0, 1, 0], [counter], of=3)]) == ("info", "")


def others(step, clusters, distance, relative):
    mean = TensorDifference("mean", (3, 1, 1), (1,), distance, relative, 1, "buffers")
    return differing(step, "buffers", clusters, [mean], of=3)


@pytest.mark.parametrize("clusters", [[0, 1], [0, 0, 1, 0], [0, 1, 2, 3]])
def test_what_no_step_moves_is_not_each_ranks_own(clusters):
    samples = [others(step, clusters, 0.4, 0.2) for step in range(0, 40, 8)]
    (alert,) = judge(run(samples, ranks=len(clusters)), [Buffers()]).alerts
    assert (alert.severity, alert.evidence["harm"]) == ("warning", "constant")
    assert "No step of the training moves `mean`" in alert.cause
    assert alert.first_step == 0


def test_a_memory_of_each_ranks_own_moves():
    samples = [others(s, [0, 1, 2, 3], 0.4 + 0.01 * s, 0.2) for s in range(0, 40, 8)]
    assert severity_of(samples) == ("info", "")


def test_nor_does_a_counter_that_lags_by_the_same_number_stand_still():
    samples = [others(s, [0, 0, 1, 0], 1.0, 1 / (1 + s)) for s in range(0, 40, 8)]
    assert severity_of(samples) == ("info", "")


def test_nor_what_differs_by_its_rounding():
    samples = [others(s, [0, 0, 1, 0], 1e-5, 1e-5) for s in range(0, 40, 8)]
    assert severity_of(samples) == ("info", "")


def test_statistics_that_differ_and_stay_as_they_are():
    samples = [equal(20, "buffers", 2), *(statistics(step, [0, 1], 0.1) for step in (30, 34))]
    assert severity_of(samples) == ("warning", "still")


def came_to_rest(at, until=60):
    return [statistics(step, [0, 1], 0.1 + 0.01 * min(step, at)) for step in range(0, until, 2)]


def test_statistics_that_moved_before_they_came_to_rest_are_dated():
    own, rest = sorted(
        judge(run(came_to_rest(30), ranks=2), [Buffers()]).alerts, key=lambda a: a.first_step
    )
    assert (own.severity, own.first_step, own.evidence["harm"]) == ("info", 0, "")
    assert (rest.severity, rest.evidence["harm"]) == ("warning", "still")
    assert since(rest) == (31, 32)
    assert rest.seen_step == 32


def test_statistics_that_move_again_no_longer_differ_by_a_constant():
    samples = [
        *came_to_rest(20, 30),
        *(statistics(step, [0, 1], 0.2 + 0.01 * step) for step in range(30, 60, 2)),
    ]
    rest = max(
        judge(run(samples, ranks=2, steps=60), [Buffers()]).alerts, key=lambda a: a.first_step
    )
    assert (rest.state, rest.first_step, rest.last_step) == ("resolved", 22, 28)


def test_statistics_of_very_different_data():
    samples = [statistics(s, [0, 1, 2, 3], 0.1 + s, variance=0.1 * s) for s in range(1, 9)]
    assert severity_of(samples) == ("warning", "far")


def own_statistics(step, ranks, jumped=None, *, since=40, size=6.0):
    """Each rank follows its own batches; `distance` is from the first rank's."""
    random = np.random.default_rng(step)
    distance = 0.05 * (1 + 0.3 * random.random(ranks))
    distance[0] = 0.0
    far = jumped is not None and step >= since
    if far:
        distance[slice(1, None) if jumped == 0 else jumped] = size * (1 + 0.01 * random.random())
    made = statistics(
        step, list(range(ranks)), float(distance.max()), variance=float(distance.max())
    )
    return replace(made, distance=distance, relative=distance)


@pytest.mark.parametrize("jumped", [0, 2])
def test_statistics_that_one_rank_has_overwritten_are_dated_and_placed(jumped):
    samples = [own_statistics(step, 4, jumped) for step in range(80)]
    found = judge(run(samples, steps=80), [Buffers()]).alerts
    own, jump = sorted(found, key=lambda alert: alert.first_step)
    assert (own.severity, own.first_step, own.evidence["harm"]) == ("info", 0, "")
    assert (jump.severity, jump.first_step, jump.ranks) == ("warning", 40, (jumped,))
    assert set(jump.tensors) == {"bn.running_mean", "bn.running_var"}
    assert "written, restored or reset" in jump.cause


def test_of_two_ranks_nothing_shows_whose_statistics_jumped():
    samples = [own_statistics(step, 2, 1) for step in range(80)]
    jump = max(
        judge(run(samples, ranks=2, steps=80), [Buffers()]).alerts, key=lambda a: a.first_step
    )
    assert (jump.first_step, jump.ranks) == (40, (0, 1))
    assert "nothing shows which one" in jump.cause


def test_statistics_that_move_within_what_batches_do_are_no_jump():
    samples = [own_statistics(step, 4, 2, size=0.3) for step in range(80)]
    assert severity_of(samples) == ("info", "")


def test_statistics_of_different_models_say_nothing_of_the_data():
    moved = [TensorDifference("w", (4, 4), (1, 2, 3), 0.3, 0.3, 9)]
    samples = [
        sample
        for s in range(1, 9)
        for sample in (
            statistics(s, [0, 1, 2, 3], 0.1 + s, variance=0.1 * s),
            differing(s, "parameters", [0, 1, 2, 3], moved, of=1),
        )
    ]
    assert severity_of(samples) == ("info", "")


def test_buffers_of_the_others_that_agree_show_nothing():
    samples = [
        of_ranks(c, 0, 1, 3) if c.step % 3 == 1 else c
        for c in (statistics(step, [0, 0, 1, 0], 0.1 + step) for step in range(30, 60))
    ]
    (alert,) = judge(run(samples), [Buffers()]).alerts
    assert (alert.first_step, alert.state) == (30, "open")


def average(step, clusters, elements=(40, 8)):
    tensor = TensorDifference("ema.w", elements, (1,), 0.1 + 0.01 * step, 0.05, 16, "buffers")
    return differing(step, "buffers", clusters, [tensor], of=3)


def test_an_average_of_the_weights_that_most_ranks_share_is_not_one_ranks_own():
    samples = [average(step, [0, 0, 1]) for step in range(1, 20)]
    (alert,) = judge(run(samples, ranks=3), [Buffers()]).alerts
    assert (alert.severity, alert.evidence["harm"], alert.ranks) == ("warning", "diverged", (2,))
    assert "On the other ranks `ema.w` agree bit for bit" in alert.cause
    assert alert.first_step == 1


def test_samples_of_two_ranks_between_do_not_hide_it():
    samples = [
        average(step, [0, 0, 1]) if step % 2 else of_ranks(average(step, [0, 0, 1]), 0, 2)
        for step in range(1, 20)
    ]
    (alert,) = judge(run(samples, ranks=3), [Buffers()]).alerts
    assert (alert.severity, alert.evidence["harm"], alert.ranks) == ("warning", "diverged", (2,))


@pytest.mark.parametrize("clusters", [[0, 1], [0, 1, 2, 3]])
def test_a_queue_that_is_filled_after_a_warm_up_is_each_ranks_own(clusters):
    samples = [
        *(equal(step, "buffers", len(clusters)) for step in range(30)),
        *(average(step, clusters) for step in range(30, 60)),
    ]
    assert severity_of(samples) == ("info", "")


def test_a_memory_that_differs_from_the_first_step_on_is_each_ranks_own():
    assert severity_of([average(step, [0, 1]) for step in range(30)]) == ("info", "")


def test_what_a_rank_counts_alone_is_its_own():
    assert severity_of([average(s, [0, 0, 1], (4,)) for s in range(1, 20)]) == ("info", "")
