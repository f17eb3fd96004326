"""Steps that begin with the seed of the one before."""

import pytest
import torch
from torch import nn

from rankscope.agent.probes.data.seeding import Seeding
from tests.support.probe_harness import Harness


@pytest.fixture(autouse=True)
def restored():
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


def repeats(draw, steps=4):
    model = nn.Linear(2, 2)
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.1), probes=[Seeding])
    try:
        for step in range(steps):
            draw(step)
            model(torch.ones(1, 2)).sum().backward()
            harness.optimizer.step()
    finally:
        harness.close()
    return [s.scalars.get("rng_repeats") for s in harness.steps]


def seeded(step, seed=5):
    torch.manual_seed(seed)
    torch.rand(3)


def apart(step):
    with torch.random.fork_rng():
        seeded(step)


def test_a_seed_that_comes_again_is_counted_step_by_step():
    assert repeats(seeded) == [0, 1, 2, 3]


def test_it_ends_with_a_step_without():
    assert repeats(lambda step: seeded(step) if step < 2 else torch.rand(1)) == [0, 1, 0, 0]


def test_no_seed_no_number():
    assert repeats(lambda step: torch.rand(3)) == [None] * 4


@pytest.mark.parametrize(
    "harmless",
    [
        lambda step: seeded(step, seed=step),
        lambda step: torch.manual_seed(5),  # and nothing is drawn
        apart,
        lambda step: torch.Generator().manual_seed(5),
    ],
)
def test_what_repeats_nothing(harmless):
    torch.manual_seed(1)
    assert set(repeats(harmless)) <= {0, None}


def test_torch_is_given_back():
    before = torch.manual_seed, torch.random.manual_seed
    repeats(seeded)
    assert (torch.manual_seed, torch.random.manual_seed) == before
