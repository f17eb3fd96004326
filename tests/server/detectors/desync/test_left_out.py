"""Tensors that are left out where the others are averaged, from their distances alone."""

import numpy as np
import pytest

from rankscope.server.detectors.desync.left_out import LeftOut
from rankscope.server.window import Comparison, TensorDifference

NAMES = ("a", "b", "c", "d")
ROUND = 8


def comparisons(step, distances, written):
    tensors = tuple(
        TensorDifference(name, (3,), (1,), distance, distance)
        for name, distance in distances.items()
    )
    clusters = np.arange(2) if tensors else np.zeros(2, dtype=np.int64)
    zeros = np.zeros(2)
    changed = np.arange(2) * written
    return [
        Comparison(step, "outside_optimizer", np.arange(2), changed, zeros, zeros),
        Comparison(
            step,
            "parameters",
            np.arange(2),
            clusters,
            zeros,
            zeros,
            tensors=tensors,
            tensor_count=4,
        ),
    ]


def found(averaged, *, steps=80, seed=0, sampled=range(10_000), keeps=lambda name, step: 1.0):
    """What is reported of a run.

    Args:
        averaged: names of the tensors that the ranks average after a step.
        keeps: what a step keeps of the distance before it, of a tensor.
    """
    random, left_out = np.random.default_rng(seed), LeftOut()
    written = False
    offsets = {name: np.zeros(256) for name in NAMES}
    for step in range(steps):
        for name in NAMES:
            offsets[name] *= keeps(name, step)
            offsets[name] += random.standard_normal(256)
        if step in sampled:
            distances = {n: float(np.linalg.norm(offsets[n])) for n in NAMES}
            left_out.take(comparisons(step, distances, written))
        written = bool(averaged(step))
        for name in averaged(step):
            offsets[name] = np.zeros(256)
    return left_out.finding()


def at_rounds(*names):
    return lambda step: names if step % ROUND == ROUND - 1 else ()


@pytest.mark.parametrize("left", ["d", "cd", "bcd"])
def test_what_never_comes_closer_is_left_out(left):
    finding = found(at_rounds(*(name for name in NAMES if name not in left)))
    assert finding.tensors == tuple(left)
    assert (finding.first_step, finding.seen_step) == (8, 32)
    assert finding.last_step == 72


def test_it_shows_where_not_every_step_is_sampled():
    finding = found(at_rounds("a", "b"), steps=400, sampled=range(0, 400, 3))
    assert finding.tensors == ("c", "d")


@pytest.mark.parametrize("turns", [0, 80])
@pytest.mark.parametrize("kept", [0.5, 0.2, 0.0])
def test_one_whose_distance_no_longer_grows_between_rounds_is_none(kept, turns):
    def keeps(name, step):
        return kept if name == "d" and step >= turns else 1.0

    assert found(at_rounds(*NAMES), steps=600, keeps=keeps) is None


def test_one_that_is_left_out_in_the_midst_shows_once_it_has_drifted():
    def averaged(step):
        names = NAMES if step < 80 else NAMES[:3]
        return names if step % ROUND == ROUND - 1 else ()

    finding = found(averaged, steps=400)
    assert finding.tensors == ("d",)
    assert 80 < finding.first_step < 160


@pytest.mark.parametrize("seed", range(20))
def test_where_all_are_averaged_after_every_step_none_is(seed):
    assert found(lambda step: NAMES, steps=400, seed=seed) is None


@pytest.mark.parametrize("seed", range(20))
def test_where_all_are_averaged_none_is(seed):
    assert found(at_rounds(*NAMES), steps=400, seed=seed) is None


@pytest.mark.parametrize("seed", range(20))
def test_parts_that_are_averaged_in_turn_are_none(seed):
    def in_turn(step):
        return NAMES[step // ROUND % 4] if step % ROUND == ROUND - 1 else ()

    assert found(in_turn, steps=400, seed=seed) is None


@pytest.mark.parametrize("seed", range(20))
def test_where_none_is_averaged_none_is(seed):
    assert found(lambda step: (), steps=400, seed=seed) is None
