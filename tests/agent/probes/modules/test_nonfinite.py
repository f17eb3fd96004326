"""Infinities and NaN put into a known place."""

import copy
import math

import pytest
import torch
from torch import nn

from rankscope.agent.probes.gradients.applied import Gradients
from rankscope.agent.probes.loss.training import Loss
from rankscope.agent.probes.modules.nonfinite import NonFinite
from tests.support.probe_harness import Harness

PROBES = (Loss, Gradients, NonFinite)


class Breaking(torch.autograd.Function):
    """Identity whose gradient breaks."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.inf


class Middle(nn.Module):
    """Breaks forward or backward on request."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.broken = ""

    def forward(self, x):
        x = self.inner(x)
        if self.broken == "forward":
            return x / torch.zeros_like(x)
        return Breaking.apply(x) if self.broken == "backward" else x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 4)
        self.middle = Middle()
        self.last = nn.Linear(4, 2)
        self.outside = False
        self.hooked = 0

    def forward(self, x):
        self.hooked = hooks(self)
        x = self.first(x)
        if self.outside:
            x = x * math.nan
        return self.last(self.middle(x))


@pytest.fixture
def net():
    return Net()


@pytest.fixture
def harness(net):
    # Steps of size 0, so that what was broken leaves the parameters as they are.
    made = Harness(net, NoStep(net.parameters()), probes=PROBES, dense_steps=0)
    made.context.schedule._masks = (0, 0, 1023, 1023, 1023)
    made.context.enter()
    yield made
    made.close()


class NoStep(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        return None


def step(net, harness, factor=1.0):
    harness.optimizer.zero_grad()
    (net(torch.ones(2, 3)).square().mean() * factor).backward()
    harness.optimizer.step()


def hooks(net):
    modules = sum(len(m._forward_hooks) for m in net.modules())
    return modules + sum(len(p._backward_hooks or ()) for p in net.parameters())


def train_until_broken(net, harness):
    """Four good steps, so that the bad one is no sampled one."""
    for _ in range(4):
        step(net, harness)
    assert harness.events == []
    assert hooks(net) == 0


def test_the_module_that_broke_in_forward_is_named(net, harness):
    train_until_broken(net, harness)
    net.middle.broken = "forward"
    step(net, harness)
    assert net.hooked == 0
    (first,) = harness.events
    assert first[:2] == (4, "nonfinite")
    assert first[3]["scalars"] == ["grad_norm", "loss"]
    step(net, harness)
    assert net.hooked > 0
    _, second = harness.events
    assert second[0] == 5
    assert second[3] == {
        "module": "middle",
        "pass": "forward",
        "input_finite": True,
        "parameters_finite": True,
    }
    assert "in forward, the output of middle" in second[2]
    step(net, harness)
    assert hooks(net) == 0
    assert len(harness.events) == 2


def test_the_module_that_broke_in_backward_is_named(net, harness):
    train_until_broken(net, harness)
    net.middle.broken = "backward"
    step(net, harness)
    (first,) = harness.events
    # What lies after the module has gradients that are not finite, what lies before it has not.
    assert first[3]["scalars"] == ["grad_norm"]
    assert first[3]["gradients"] == {
        "first.weight": 12,
        "first.bias": 4,
        "middle.inner.weight": 16,
        "middle.inner.bias": 4,
    }
    step(net, harness)
    said = harness.events[1][3]
    assert said == {
        "module": "",
        "pass": "backward",
        "gradient": "the output of middle.inner",
    }


def test_counts_are_posted_tensor_by_tensor_at_sampled_steps(net, harness):
    train_until_broken(net, harness)
    net.middle.broken = "backward"
    for _ in range(2):
        step(net, harness)
    (made,) = harness.steps[5].layers
    assert made.metric == "grad_nonfinite"
    assert made.values.tolist() == [12, 4, 16, 4, 0, 0]
    assert all(not s.layers for s in harness.steps[:5])


def test_a_value_made_outside_of_modules_is_reported_as_such(net, harness):
    train_until_broken(net, harness)
    net.outside = True
    for _ in range(2):
        step(net, harness)
    said = harness.events[1]
    assert said[3]["module"] == "middle.inner"
    assert not said[3]["input_finite"]
    assert "outside of any module" in said[2]


def test_parameters_that_are_broken_already_are_reported_as_such(net, harness):
    train_until_broken(net, harness)
    with torch.no_grad():
        net.last.weight[0, 0] = math.nan
    for _ in range(2):
        step(net, harness)
    said = harness.events[1][3]
    assert said["module"] == "last"
    assert not said["parameters_finite"]


def test_a_loss_that_breaks_the_gradient_is_named_by_what_it_reaches(net, harness):
    train_until_broken(net, harness)
    for _ in range(2):
        step(net, harness, factor=math.inf)
    said = harness.events[1][3]
    assert said == {"module": "", "pass": "backward", "gradient": "the output of last"}


def test_one_incident_is_examined_once(net, harness):
    train_until_broken(net, harness)
    net.middle.broken = "forward"
    for _ in range(80):
        step(net, harness)
    assert len(harness.events) == 2
    net.middle.broken = ""
    for _ in range(65):
        step(net, harness)
    assert len(harness.events) == 2
    net.middle.broken = "forward"
    for _ in range(2):
        step(net, harness)
    assert len(harness.events) == 4


def test_the_hooks_change_nothing_and_stay_on_no_copy(net, harness):
    train_until_broken(net, harness)
    net.middle.broken = "backward"
    step(net, harness)
    net.middle.broken = ""
    loss = net(torch.ones(2, 3)).square().mean()
    assert hooks(net) > 0
    checks = len(harness.probes[-1]._checks)
    assert checks
    twin = copy.deepcopy(net)
    twin(torch.ones(2, 3)).square().mean().backward()
    assert len(harness.probes[-1]._checks) == checks
    harness.optimizer.zero_grad()
    loss.backward()
    assert len(harness.probes[-1]._checks) > checks
    harness.optimizer.step()
    assert hooks(net) == 0
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    harness.close()
    assert hooks(net) == 0


def test_the_probe_does_not_have_a_model_compiled_anew(net):
    torch._dynamo.reset()
    compiled = torch.compile(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), backend="eager")
    inner = compiled._orig_mod
    harness = Harness(inner, NoStep(inner.parameters()), probes=PROBES)
    torch._dynamo.utils.counters.clear()
    for factor in (1.0, 1.0, math.inf, 1.0, 1.0):
        compiled(torch.ones(2, 3) * factor).sum().backward()
        harness.optimizer.step()
        harness.optimizer.zero_grad()
    assert len(harness.events) == 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    harness.close()
