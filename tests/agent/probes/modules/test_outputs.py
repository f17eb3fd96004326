"""How far the vectors that a model returns point the same way, through real training steps."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from rankscope.agent.probes.modules.outputs import Outputs
from tests.support.probe_harness import Harness


class Returns(nn.Module):
    """Returns what it is given, times a weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, *given):
        return tuple(one * self.weight for one in given)


def scalars_of(*given, steps=1):
    model = Returns()
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.0), probes=[Outputs])
    try:
        for _ in range(steps):
            sum(one.sum() for one in model(*given)).backward()
            harness.optimizer.step()
    finally:
        harness.close()
    return {name: float(value) for name, value in harness.steps[-1].scalars.items()}


def test_vectors_that_point_the_same_way_have_no_spread():
    same = torch.rand(32, 1) * torch.arange(1.0, 9.0)
    found = scalars_of(same, 3 * same)
    assert found["output_spread"] == pytest.approx(0, abs=1e-6)
    assert found["outputs_compared"] == 2


def test_vectors_that_point_anywhere_have_all_of_it():
    torch.manual_seed(0)
    found = scalars_of(torch.randn(64, 16), torch.randn(64, 16), torch.ones(64, 3))
    assert found["output_spread"] == pytest.approx(1, abs=0.03)
    assert found["outputs_compared"] == 2


@pytest.mark.parametrize("shape", [(8, 1), (8,), (8, 3, 4), ()])
def test_what_is_no_batch_of_vectors_is_not_compared(shape):
    assert not {"output_spread", "outputs_compared"} & set(scalars_of(torch.ones(shape)))


class LossInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
        self.predictor = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 4))

    def forward(self, first, second):
        first, second = self.encoder(first), self.encoder(second)
        one, other = self.predictor(first), self.predictor(second)
        return -functional.cosine_similarity(one, second).mean() - (
            functional.cosine_similarity(other, first).mean()
        )


def test_a_model_with_its_loss_inside_is_represented_by_what_it_calls_last():
    torch.manual_seed(0)
    model = LossInside()
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.1), probes=[Outputs])
    hooks = []
    for _ in range(4):
        loss = model(torch.randn(16, 6), torch.randn(16, 6))
        hooks.append(sum(len(module._forward_hooks) for module in model.modules()))
        loss.backward()
        harness.optimizer.step()
    compared = [step.scalars.get("outputs_compared") for step in harness.steps]
    harness.close()
    assert compared[2:] == [2, 2]
    # The root, then all with weights to find the last one, then that one beside the root.
    assert hooks == [1, 5, 2, 2]
    assert not any(module._forward_hooks for module in model.modules())


def test_evaluations_and_passes_without_gradients_are_not_compared():
    model = Returns()
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.1), probes=[Outputs])
    with torch.no_grad():
        model(torch.randn(8, 4), torch.randn(8, 4))
    model.eval()
    model(torch.randn(8, 4))
    model.train()
    model(torch.randn(8, 4))[0].sum().backward()
    harness.optimizer.step()
    harness.close()
    assert harness.steps[0].scalars["outputs_compared"] == 1


def test_what_a_transformation_or_a_checkpoint_runs_is_not_compared():
    model = Returns()
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.1), probes=[Outputs])
    torch.func.vmap(lambda x: model(x)[0])(torch.randn(3, 8, 4))
    again = torch.utils.checkpoint.checkpoint(
        lambda x: model(x)[0] * 2, torch.randn(8, 4), use_reentrant=False
    )
    again.sum().backward()
    harness.optimizer.step()
    harness.close()
    assert harness.steps[0].scalars["outputs_compared"] == 1


def test_outputs_in_the_shape_of_the_input_are_reconstructions():
    torch.manual_seed(0)
    assert scalars_of(torch.randn(64, 4, 5))["reconstruction_spread"] == pytest.approx(1, abs=0.03)
    same = torch.rand(4, 5).expand(32, 4, 5)
    assert scalars_of(same)["reconstruction_spread"] == pytest.approx(0, abs=1e-6)
    assert "reconstruction_spread" not in scalars_of(torch.randn(32, 4))


class Rebuilds(nn.Module):
    """Returns what it is given, times a weight: a reconstruction."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, given):
        return given * self.weight


def test_reconstructions_of_other_sizes_are_left_out():
    model = Rebuilds()
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.0), probes=[Outputs])
    for length in (10, 12, 10):
        model(torch.randn(4, 3, length)).sum().backward()
    harness.optimizer.step()
    harness.close()
    # Of the first size there are eight samples, which point anywhere.
    assert float(harness.steps[0].scalars["reconstruction_spread"]) > 0.5


@pytest.mark.parametrize("edge", ["rows", "columns"])
def test_images_that_are_alike_at_their_edges(edge):
    torch.manual_seed(0)
    image = torch.ones(64, 1, 64, 64)
    image[:, :, 16:48, 16:48] = torch.randn(64, 1, 32, 32)
    # Of a picture that is as wide as the numbers that are compared, each row begins with the edge.
    given = image if edge == "rows" else functional.pad(image, (96, 96), value=1.0)
    assert scalars_of(given)["reconstruction_spread"] > (0.15 if edge == "rows" else 0.03)


def test_of_large_reconstructions_a_few_numbers_are_copied_and_no_more():
    model = Rebuilds()
    image = torch.randn(128, 4, 64, 64)
    with_channels_last = image.to(memory_format=torch.channels_last)
    spreads = []
    for given in (image, with_channels_last):
        harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.0), probes=[Outputs])
        largest = Largest()
        loss = model(given)  # its hooks run inside
        with largest:
            harness.probes[0]._module_called(0, model, (), loss)
        loss.sum().backward()
        harness.optimizer.step()
        harness.close()
        spreads.append(float(harness.steps[0].scalars["reconstruction_spread"]))
        assert largest.numbers <= 64 * 256
    assert spreads[0] == pytest.approx(spreads[1], abs=1e-6)


class Largest(TorchDispatchMode):
    """The largest tensor that is newly made inside."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
            self.numbers = max(self.numbers, made.numel())
        return made
