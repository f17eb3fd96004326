"""How large the weights are that a training begins with."""

import math

import pytest
import torch
from torch import nn

from rankscope.agent.probes.modules.initial_gain import InitialGain
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
