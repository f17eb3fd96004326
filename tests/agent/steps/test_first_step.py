"""Where a run begins to count, read off its optimizer."""

import pytest
import torch

from rankscope.agent.model.facts import first_step


def trained(steps, gradient, kind=torch.optim.AdamW):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = kind([parameter], lr=0.1)
    for _ in range(steps):
        parameter.grad = torch.full((3,), gradient)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_steps_taken_before(steps):
    assert first_step(trained(steps, 0.5)) == steps


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_a_step_that_only_makes_the_state_is_none(kind):
    assert first_step(trained(1, 0.0, kind)) == 0
    assert first_step(trained(1, 0.5, kind)) == 1


def test_a_state_without_moments_is_believed():
    optimizer = trained(0, 0.0, torch.optim.SGD)
    optimizer.state[optimizer.param_groups[0]["params"][0]]["step"] = 1
    assert first_step(optimizer) == 1
