"""Parameters that something else than the optimizer writes, now and then or again and again."""

import pytest
import torch
from torch import nn

from rankscope.agent.probes.parameters.trained import Parameters
from tests.support.probe_harness import Harness


def stages_after(steps, *, written):
    """Stages of the fingerprints of each step, where `written` says before which it is written."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = Harness(model, optimizer, probes=(Parameters,), sampled=lambda step: True)
    for step in range(steps):
        if written(step):
            with torch.no_grad():
                model.weight.mul_(0.5)
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    job.close()
    return [[f.stage for f in facts.fingerprints if f.stage != "parameters"] for facts in job.steps]


@pytest.mark.parametrize("period", [2, 4, 7])
def test_what_comes_back_after_steps_without_is_an_average(period):
    found = stages_after(2 * period + 1, written=lambda step: step and step % period == 0)
    assert {step: stages for step, stages in enumerate(found) if stages} == {
        period: ["average"],
        2 * period: ["average"],
    }


def test_what_has_not_come_for_long_is_an_event_of_its_own():
    found = stages_after(14, written=lambda step: step == 12)
    assert {step: stages for step, stages in enumerate(found) if stages} == {
        12: ["outside_optimizer"]
    }


def test_what_is_written_at_every_step_is_compared_as_the_step_leaves_it():
    assert not any(stages_after(12, written=lambda step: step > 0)[2:])
