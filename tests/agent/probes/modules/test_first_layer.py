"""How large the numbers are that the first layer with weights is given."""

import math

import pytest
import torch
from torch import nn

from rankscope.agent.probes.modules.first_layer import FirstLayer
from tests.support.probe_harness import Harness

SERIES = "first_layer_input_rms"


def sizes(model, given, *, steps=12):
    """What was posted at each step."""
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=1e-9), probes=[FirstLayer])
    try:
        for _ in range(steps):
            harness.optimizer.zero_grad()
            model(given()).square().mean().backward()
            harness.optimizer.step()
    finally:
        harness.close()
    return [s.scalars.get(SERIES) for s in harness.steps]


def pixels(*shape):
    return lambda: torch.randint(0, 256, shape).float()


def test_pixels_are_large_at_the_first_samples():
    found = sizes(nn.Linear(16, 2), pixels(8, 16))
    assert all(100 < float(size) < 200 for size in found[:8])
    assert found[8:] == [None] * 4


class Divides(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 2))

    def forward(self, given):
        return self.layers(given / 255)


def test_what_the_model_itself_scales_is_scaled():
    assert 0.4 < float(sizes(Divides(), pixels(8, 16))[0]) < 0.8


def rarely():
    given = torch.zeros(8, 1000)
    given[torch.arange(8), torch.randint(1000, (8,))] = 1
    return given


def test_zeros_do_not_make_the_others_small():
    assert float(sizes(nn.Linear(1000, 2), rarely)[0]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (lambda: nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 2)), pixels(8, 16)),
        (lambda: nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 2)), pixels(8, 16)),
        (
            lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten()),
            pixels(8, 1, 5, 5),
        ),
        (
            lambda: nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 2)),
            lambda: torch.randint(50, (8, 4)),
        ),
    ],
    ids=["normalised before", "normalised after", "convolution", "embedding"],
)
def test_where_scale_does_not_matter_nothing_is_said(model, given):
    assert set(sizes(model(), given)) == {None}


def test_recurrent_layers_of_several_passes():
    model = nn.GRU(3, 4, batch_first=True)

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.out = model, nn.Linear(4, 1)

        def forward(self, given):
            return self.out(self.inner(given)[0][:, -1])

    found = sizes(Last(), lambda: 1000 * torch.ones(2, 5, 3))
    assert float(found[0]) == pytest.approx(1000)


def test_hooks_go_and_outputs_stay():
    model = nn.Linear(4, 2)
    before = model(torch.ones(1, 4))
    sizes(model, lambda: torch.full((2, 4), math.pi), steps=3)
    assert not model._forward_hooks
    assert torch.allclose(model(torch.ones(1, 4)), before, atol=1e-5)
