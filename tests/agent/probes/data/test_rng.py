"""Digests of the random states."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from rankscope.agent.probes.data.rng import RandomState
from tests.support.probe_harness import Harness

NAMES = ("rng/torch", "rng/numpy", "rng/python")


@pytest.fixture
def seeded():
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    yield
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def digests(draw=lambda step: None, steps=2):
    model = nn.Linear(2, 2)
    torch.manual_seed(1)
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.1), probes=[RandomState])
    try:
        for step in range(steps):
            draw(step)
            model(torch.ones(1, 2)).sum().backward()
            harness.optimizer.step()
    finally:
        harness.close()
    return [s.digests for s in harness.steps]


def test_states_that_nobody_draws_from_stay(seeded):
    first, second = digests()
    assert set(first) == set(NAMES)
    assert first == second


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("rng/torch", lambda: torch.rand(1)),
        ("rng/numpy", lambda: np.random.random()),
        ("rng/numpy", lambda: np.random.normal()),
        ("rng/python", lambda: random.random()),
        ("rng/python", lambda: random.gauss(0, 1)),
    ],
)
def test_one_draw_changes_its_own_digest_alone(seeded, name, draw):
    first, second = digests(lambda step: draw() if step else None)
    assert {n for n in NAMES if first[n] != second[n]} == {name}


def test_equal_seeds_have_equal_digests(seeded):
    first = digests()
    np.random.seed(1)
    random.seed(1)
    assert digests() == first


def test_reading_changes_nothing(seeded):
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    model = nn.Linear(2, 2)
    torch.set_rng_state(before[0])
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.1), probes=[RandomState])
    try:
        model(torch.ones(1, 2)).sum().backward()
        harness.optimizer.step()
    finally:
        harness.close()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]
