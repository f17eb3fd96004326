"""Parameters that move before any step has ended, and those that a step itself moves."""

import torch
from torch import nn

from rankscope.agent.probes.parameters.moved import EVENT, MovedWithoutStep
from tests.support.probe_harness import Harness

INPUTS, TARGETS = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.ones(16, 2)


def harness_of(optimizer_class, **settings):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = optimizer_class(model.parameters(), **settings)
    return model, Harness(model, optimizer, probes=(MovedWithoutStep,))


def backward(model):
    loss = (model(INPUTS) - TARGETS).square().mean()
    loss.backward()
    return loss


def test_a_loop_that_changes_the_parameters_itself():
    model, harness = harness_of(torch.optim.SGD, lr=0.1)
    for _ in range(8):
        model.zero_grad()
        backward(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    assert [(step, kind) for step, kind, *_ in harness.events] == [(0, EVENT)]


def test_many_passes_of_one_step_that_calls_the_model_itself():
    model, harness = harness_of(torch.optim.LBFGS, lr=0.1, max_iter=20)

    def closure():
        harness.optimizer.zero_grad()
        return backward(model)

    harness.optimizer.step(closure)
    assert len(harness.steps) == 1
    assert not harness.events
