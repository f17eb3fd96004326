"""Dead and saturated units, against outputs made by hand."""

import copy
import io
import math

import pytest
import torch
from torch import nn

from rankscope.agent.fingerprint import kernel
from rankscope.agent.probes.modules.activations import (
    Activations,
    _active_here,
    _active_there,
    _lies_here,
)
from tests.support.probe_harness import Harness


def harness_of(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return Harness(model, optimizer, probes=(Activations,), **options)


def step(model, harness, *inputs):
    for x in inputs:
        model(x).sum().backward()
    harness.optimizer.step()
    return {made.metric: made.values.tolist() for made in harness.steps[-1].layers}


def identity(size):
    layer = nn.Linear(size, size, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(size))
    return layer


def test_a_unit_is_dead_where_no_sample_of_the_step_made_it_move():
    model = nn.Sequential(identity(4), nn.ReLU())
    harness = harness_of(model)
    table = harness.announced["activations"]
    assert table.names == ("1",)
    assert table.dtypes == ("ReLU",)
    first = torch.tensor([[1.0, -1.0, -1.0, 0.0], [-1.0, -1.0, -1.0, 0.0]])
    second = torch.tensor([[-1.0, 2.0, -1.0, -3.0]])
    assert step(model, harness, first) == {"dead_units": [0.75]}
    assert step(model, harness, first, second) == {"dead_units": [0.5]}
    # One that is NaN is not dead.
    assert step(model, harness, first * math.nan) == {"dead_units": [0.0]}
    harness.close()


def test_tokens_have_features_and_images_have_channels():
    tokens = nn.Sequential(identity(2), nn.ReLU())
    harness = harness_of(tokens)
    x = -torch.ones(3, 5, 2)
    x[1, 4, 0] = 1
    assert step(tokens, harness, x) == {"dead_units": [0.5]}
    harness.close()

    convolution = nn.Conv2d(1, 4, 1, bias=False)
    with torch.no_grad():
        convolution.weight.copy_(torch.tensor([1.0, -1.0, -1.0, -1.0]).view(4, 1, 1, 1))
    images = nn.Sequential(convolution, nn.BatchNorm2d(4, affine=False).eval(), nn.ReLU6())
    images.train()
    images[1].eval()
    harness = harness_of(images)
    assert step(images, harness, torch.ones(2, 1, 3, 3)) == {"dead_units": [0.75]}
    harness.close()


def test_a_unit_is_saturated_where_all_samples_leave_it_at_the_ends():
    model = nn.Sequential(identity(4), nn.Tanh(), nn.Sigmoid())
    harness = harness_of(model)
    # tanh(3) = 0.995, tanh(2) = 0.964
    x = torch.tensor([[3.0, -3.0, 3.0, 0.0], [-3.0, -3.0, 2.0, 0.0]])
    assert step(model, harness, x) == {"saturated_units": [0.5, 0.0]}
    harness.close()
    sigmoid = nn.Sequential(identity(3), nn.Sigmoid())
    harness = harness_of(sigmoid)
    # sigmoid(6) = 0.9975, sigmoid(5) = 0.9933
    assert step(sigmoid, harness, torch.tensor([[6.0, 5.0, -6.0]])) == {
        "saturated_units": [pytest.approx(2 / 3)]
    }
    harness.close()


class Twice(nn.Module):
    """One module called twice, one never, one of the other kind."""

    def __init__(self):
        super().__init__()
        self.layer = identity(2)
        self.act = nn.ReLU()
        self.spare = nn.ReLU()
        self.tanh = nn.Tanh()

    def forward(self, x):
        return self.tanh(self.act(self.layer(x)) + self.act(self.layer(-x)))


def test_each_call_of_a_module_counts_with_its_units():
    model = Twice()
    harness = harness_of(model)
    found = step(model, harness, torch.tensor([[9.0, 9.0]]))
    assert found["dead_units"][0] == 0.5
    assert math.isnan(found["dead_units"][1])
    assert math.isnan(found["dead_units"][2])
    assert found["saturated_units"][2] == 1.0
    # In a second micro-batch the first call is the first again.
    found = step(model, harness, torch.tensor([[9.0, 9.0]]), torch.tensor([[-9.0, 9.0]]))
    assert found["dead_units"][0] == 0.25
    harness.close()


def test_hooks_are_there_in_sampled_steps_only_and_copies_are_silent():
    model = nn.Sequential(identity(4), nn.ReLU())
    harness = harness_of(model, dense_steps=1)
    harness.context.schedule._masks = (0, 0, 0, 3, 3)
    assert not model[1]._forward_hooks
    model(torch.ones(1, 4))
    assert len(model[1]._forward_hooks) == 1
    twin = copy.deepcopy(model)
    twin(torch.ones(1, 4))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(loaded(torch.ones(1, 4)), torch.ones(1, 4))
    assert harness.probes[0]._called == [1]
    hooked = []
    for _ in range(5):
        loss = model(torch.ones(1, 4)).sum()
        hooked.append(len(model[1]._forward_hooks))
        loss.backward()
        harness.optimizer.step()
        assert not model[1]._forward_hooks
    assert hooked == [1, 0, 0, 0, 1]
    assert [len(s.layers) for s in harness.steps] == hooked
    # An evaluation is no training.
    for _ in range(3):
        harness.optimizer.step()
    model.eval()
    model(torch.ones(1, 4))
    model.train()
    harness.optimizer.step()
    assert harness.steps[-1].step == 8
    assert harness.steps[-1].layers == []
    harness.close()
    assert not model[1]._forward_hooks


def test_a_compiled_model_is_left_alone():
    model = torch.compile(nn.Sequential(identity(4), nn.ReLU()), backend="eager")
    harness = harness_of(model)
    assert harness.announced == {}
    step(model, harness, torch.ones(1, 4))
    assert harness.steps[0].layers == []
    harness.close()


def test_a_model_is_not_compiled_anew_for_the_hooks():
    torch._dynamo.reset()
    inner = nn.Sequential(identity(4), nn.ReLU())
    compiled = torch.compile(inner, backend="eager")
    harness = harness_of(inner, dense_steps=2)
    harness.context.schedule._masks = (0, 0, 0, 3, 3)
    torch._dynamo.utils.counters.clear()
    for _ in range(6):
        step(compiled, harness, torch.ones(1, 4))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    harness.close()


def test_units_are_dead_for_good_after_512_samples_without_a_sign():
    model = nn.Sequential(identity(4), nn.ReLU())
    harness = harness_of(model, sampled=lambda step: True)
    quiet = torch.tensor([[1.0, -1.0, -1.0, -1.0]]).repeat(200, 1)
    loud = quiet.clone()
    loud[7, 1] = 1.0
    known = [step(model, harness, x).get("dead_units_lasting") for x in (loud, quiet, quiet)]
    assert known == [None, None, [0.5]]
    # What was seen in the last full count still counts until the next one is full.
    known = [step(model, harness, quiet)["dead_units_lasting"] for _ in range(4)]
    assert known == [[0.5], [0.5], [0.5], [0.75]]
    harness.close()


def test_samples_of_images_are_images_and_of_tokens_places():
    torch.manual_seed(0)
    convolution = nn.Conv2d(1, 4, 1)
    images = nn.Sequential(convolution, nn.ReLU())
    harness = harness_of(images, sampled=lambda step: True)
    assert "dead_units_lasting" not in step(images, harness, torch.ones(500, 1, 2, 2))
    assert "dead_units_lasting" in step(images, harness, torch.ones(12, 1, 2, 2))
    harness.close()
    tokens = nn.Sequential(identity(2), nn.Tanh())
    harness = harness_of(tokens, sampled=lambda step: True)
    assert "saturated_units_lasting" not in step(tokens, harness, torch.ones(8, 60, 2))
    assert step(tokens, harness, torch.ones(8, 4, 2))["saturated_units_lasting"] == [0.0]
    harness.close()


@pytest.mark.skipif(kernel.activity() is None, reason="built without the kernel")
@pytest.mark.parametrize("module", [nn.ReLU(), nn.ReLU6(), nn.Tanh(), nn.Sigmoid()], ids=str)
@pytest.mark.parametrize(
    ("shape", "unit"), [((7,), 0), ((5, 600), 1), ((2, 3, 4), 2), ((2, 5, 3, 2), 1)]
)
def test_the_kernel_says_of_a_unit_what_torch_says(module, shape, unit):
    torch.manual_seed(0)
    ends = torch.tensor([0.0, -0.0, -1.0, 1.0, 0.99, -0.99, 0.995, 0.005, 0.5, 0.004999, 1e-42])
    ends = torch.cat(
        [ends, torch.nextafter(ends, torch.ones(())), torch.tensor([math.nan, math.inf])]
    )
    for kinds in (2, 4, len(ends)):
        for _ in range(30):
            few = ends[torch.randperm(len(ends))[:kinds]]
            output = few[torch.randint(0, kinds, shape)]
            assert _lies_here(output)
            here = _active_here(module, output, unit)
            assert torch.equal(here, _active_there(module, output, unit)), (module, output)


def test_outputs_that_do_not_lie_as_they_read_are_left_to_torch():
    output = torch.zeros(4, 6)
    assert not _lies_here(output.t())
    assert not _lies_here(output.double())
    assert not _lies_here(output.to("meta"))
    assert not _lies_here(output.to_sparse())
    assert not _lies_here(torch.zeros(2, dtype=torch.complex64).conj().imag)
    assert not _lies_here(nn.Parameter(output))
    seen = []
    torch.func.vmap(lambda row: seen.append(_lies_here(row)) or row)(output)
    assert seen == [False]
