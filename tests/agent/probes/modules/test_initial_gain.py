"""How large the weights are that a training begins with."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from rankscope.agent.probes.modules.initial_gain import InitialGain, _gain
from tests.support.probe_harness import Harness


def gains(model, *, trained=None, steps=3):
    """What was posted at each step."""
    parameters = list(model.parameters()) if trained is None else trained
    harness = Harness(model, torch.optim.SGD(parameters, lr=1.0), probes=[InitialGain])
    try:
        for _ in range(steps):
            harness.optimizer.zero_grad()
            model(torch.randn(4, 64)).square().mean().backward()
            harness.optimizer.step()
    finally:
        harness.close()
    return [s.scalars.get("initial_gain") for s in harness.steps]


def stack(times=1.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(times)
    return model


@pytest.mark.parametrize("times", [1.0, 20.0])
def test_the_median_of_the_layers_once(times):
    first, *later = gains(stack(times))
    assert float(first) == pytest.approx(times / math.sqrt(3), rel=0.1)  # drawn evenly
    assert later == [None, None]


def test_layers_at_zero_count_only_where_all_of_them_are():
    model = stack()
    with torch.no_grad():
        model[2].weight.zero_()
        model[3].weight.zero_()
    assert float(gains(model)[0]) == pytest.approx(1 / math.sqrt(3), rel=0.1)
    assert float(gains(stack(0.0))[0]) == 0.0


def test_weights_that_are_no_numbers_have_no_gain():
    model = stack()
    with torch.no_grad():
        model[2].weight.fill_(math.nan)
    assert math.isnan(float(gains(model)[0]))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 64)
        self.inner, self.outer = nn.Linear(64, 64), nn.Linear(64, 64)
        self.scores = nn.Linear(64, 50, bias=False)
        self.scores.weight = self.words.weight

    def forward(self, given):
        return self.scores(self.outer(self.inner(given)))


def test_what_an_embedding_shares_does_not_count():
    assert float(gains(Tied())[0]) == pytest.approx(1 / math.sqrt(3), rel=0.1)


def frozen():
    model = stack(20.0)
    for layer in list(model)[1:]:
        layer.requires_grad_(False)
    return model


@pytest.mark.parametrize("model", [lambda: nn.Linear(64, 2), frozen], ids=["one", "one trained"])
def test_of_a_single_layer_nothing_is_said(model):
    made = model()
    found = gains(made, trained=[p for p in made.parameters() if p.requires_grad])
    assert set(found) == {None}


@pytest.fixture
def mesh():
    # The first of two ranks, the second of which is not there: a collective would find nobody.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_sharded_weights_are_read_without_a_collective(mesh):
    whole = nn.Linear(64, 8).weight.detach()
    sharded = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    with CommDebugMode() as calls:
        found = _gain(sharded)
    assert calls.get_total_counts() == 0
    assert float(found) == pytest.approx(float(_gain(nn.Parameter(whole[:4]))))
