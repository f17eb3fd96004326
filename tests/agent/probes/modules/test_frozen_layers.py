"""Layers that nobody trained, frozen between trained ones."""

import pytest
import torch
from torch import nn

from rankscope.agent.probes.modules.frozen_layers import BASE, EVENT, FrozenLayers
from tests.support.probe_harness import Harness


def stack(width=16):
    torch.manual_seed(0)
    layers = [(nn.Linear(width, width), nn.Tanh()) for _ in range(5)]
    return nn.Sequential(*(layer for pair in layers for layer in pair))


def told(model, *, trained=None, steps=12, event=EVENT):
    """Names in the events of some steps."""
    parameters = [p for p in model.parameters() if p.requires_grad] if trained is None else trained
    harness = Harness(model, torch.optim.SGD(parameters, lr=0.01), probes=[FrozenLayers])
    try:
        for _ in range(steps):
            harness.optimizer.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            harness.optimizer.step()
    finally:
        harness.close()
    return [data["tensors"] for _, kind, _, data in harness.events if kind == event]


def test_a_layer_in_the_middle_is_named_once():
    model = stack()
    model[4].requires_grad_(False)
    assert told(model) == [["4.weight", "4.bias"]]


def test_a_convolution():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Flatten(),
        nn.Linear(128, 16),
    )
    model[2].requires_grad_(False)
    assert told(model) == [["2.weight", "2.bias"]]


def learned(model):
    with torch.no_grad():
        model[4].weight.add_(0.02 * torch.randn(16, 16))
    model[4].requires_grad_(False)


def first_ones(model):
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)


def nothing(model):
    pass


@pytest.mark.parametrize("freeze", [learned, first_ones, nothing])
def test_what_is_frozen_on_purpose_is_let_alone(freeze):
    model = stack()
    freeze(model)
    assert told(model) == []
    assert told(model, event=BASE) == []


@pytest.mark.parametrize("frozen", [slice(0, 8), slice(2, 10)], ids=["body", "all but the first"])
def test_a_body_that_nobody_trained(frozen):
    model = stack()
    model[frozen].requires_grad_(False)
    ((*names,),) = told(model, event=BASE)
    assert len(names) == 8
    assert told(model) == []


def test_a_body_that_was_trained_elsewhere():
    model = stack()
    body = model[:8].requires_grad_(False)
    for parameter in body.parameters():
        parameter.add_(0.02 * torch.randn(parameter.shape))
    assert told(model, event=BASE) == []


def test_one_random_projection_may_be_meant():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 4))
    model[0].requires_grad_(False)
    assert told(model, event=BASE) == []


def test_what_the_forward_pass_does_not_go_through_is_no_body():
    class Taught(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.teacher = nn.Linear(16, 16), stack()
            self.teacher.requires_grad_(False)

        def forward(self, x):
            with torch.no_grad():
                target = self.teacher(x)
            return self.head(x) - target

    assert told(Taught(), event=BASE) == []


def test_a_teacher_that_no_gradient_comes_back_from():
    class Taught(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head, self.teacher = (nn.Linear(16, 16) for _ in range(3))
            self.teacher.requires_grad_(False)

        def forward(self, x):
            hidden = self.body(x)
            return self.head(hidden) - self.teacher(hidden).detach()

    torch.manual_seed(0)
    assert told(Taught()) == []


def test_what_another_optimizer_trains_in_turns_has_moved_by_then():
    model = stack()
    mine = [p for name, p in model.named_parameters() if not name.startswith("4.")]
    other = torch.optim.SGD(model[4].parameters(), lr=0.1)

    def turn(module, args):
        for parameter in model[4].parameters():
            parameter.requires_grad_(True)
            parameter.grad = torch.randn_like(parameter)
        other.step()
        model[4].requires_grad_(False)

    model.register_forward_pre_hook(turn)
    assert told(model, trained=mine) == []
