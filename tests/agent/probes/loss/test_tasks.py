"""Which set of parameters had a gradient, by number."""

import torch
from torch import nn

from rankscope.agent.probes.gradients.applied import Gradients
from tests.support.probe_harness import Harness


def tasks_of(heads):
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    harness = Harness(model, optimizer, probes=[Gradients], sampled=lambda step: True)
    for head in heads:
        optimizer.zero_grad()
        model[head](torch.ones(4, 3)).sum().backward()
        optimizer.step()
    harness.close()
    return [step.scalars.get("task") for step in harness.steps]


def test_sets_of_parameters_with_a_gradient_are_numbered_as_they_come():
    assert tasks_of([0, 1, 0, 2, 1]) == [None, 1, 0, 2, 1]


def test_one_set_needs_no_number():
    assert tasks_of([1, 1, 1]) == [None, None, None]
