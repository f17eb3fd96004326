"""Parts of a model that are to be trained and are called without gradients."""

import pytest
import torch
from torch import nn

from rankscope.agent.probes.modules.without_gradient import WithoutGradient
from tests.support.probe_harness import Harness

SERIES = "tensors_called_without_gradient"


class Parts(nn.Module):
    """An encoder, a head, and one part that the output does not depend on."""

    def __init__(self, *, barred=False, detached=False, computed=False):
        super().__init__()
        self.encoder, self.head, self.beside = nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(3, 5)
        self.barred, self.detached, self.computed = barred, detached, computed

    def forward(self, x):
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.barred):
            made = self.encoder(x)
        if self.computed:
            self.beside(made)
        return self.head(made.detach() if self.detached else made)


def posted(model, steps=14, between=None):
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.1), probes=[WithoutGradient])
    try:
        for _ in range(steps):
            harness.optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            harness.optimizer.step()
            if between is not None:
                between(model)
    finally:
        harness.close()
    return [step.scalars.get(SERIES) for step in harness.steps]


def test_an_encoder_that_is_called_without_gradients():
    found = posted(Parts(barred=True))
    assert found[:8] == [None] * 8
    assert found[8:] == [2] * 6


@pytest.mark.parametrize("options", [{}, {"computed": True}, {"detached": True}])
def test_what_is_not_used_is_called_with_gradients_or_not_at_all(options):
    assert set(posted(Parts(**options))[8:]) == {0}


def test_nothing_is_asked_where_every_tensor_has_a_gradient():
    assert posted(nn.Linear(4, 2)) == [None] * 14


def test_an_evaluation_is_no_training_pass():
    def evaluate(model):
        with torch.no_grad():
            model.beside(model.encoder(torch.randn(2, 4)))
            model(torch.randn(2, 4))

    assert set(posted(Parts(), between=evaluate)[8:]) == {0}


def test_hooks_are_gone_in_the_end():
    model = Parts(barred=True)
    posted(model)
    assert not any(module._forward_hooks for module in model.modules())
