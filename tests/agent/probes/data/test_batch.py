"""Digests and counts of batches, through real forward passes."""

from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rankscope.agent.probes.data.batch import Batch
from rankscope.agent.probes.loss.training import Loss
from rankscope.agent.wire import BATCH_PART
from tests.support.probe_harness import Harness


class Net(nn.Module):
    """Takes anything; each tensor in it counts."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, *args, **kwargs):
        return self.weight * 2


@dataclass
class Graph:
    nodes: torch.Tensor
    label: str


def run(*steps, model=None):
    """One list of calls a step, each (args, kwargs)."""
    model = model or Net()
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.1), probes=[Batch])
    try:
        for calls in steps:
            for args, kwargs in calls:
                model(*args, **kwargs).sum().backward()
            harness.optimizer.step()
    finally:
        harness.close()
    return [s.digests.get("batch") for s in harness.steps], harness


def image(seed, size=4):
    return torch.randn(size, 3, 5, generator=torch.Generator().manual_seed(seed))


def digest(*args, **kwargs):
    return run([(args, kwargs)])[0][0]


def test_equal_batches_have_equal_digests_and_others_do_not():
    digests, _ = run(*([((image(seed),), {})] for seed in (0, 1, 0)))
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.parametrize("place", [0, 17, 59])
def test_one_changed_element_shows(place):
    changed = image(0)
    changed.view(-1)[place] += 1e-6
    assert digest(image(0)) != digest(changed)


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda x: ((), {"x": x}),
        lambda x: (({"a": {"b": x}},), {}),
        lambda x: (([x],), {}),
        lambda x: ((UserDict(x=x),), {}),
        lambda x: ((Graph(x, "g"),), {}),
        lambda x: ((3, None, "s", x), {}),
    ],
)
def test_tensors_are_found_where_people_put_them(wrapped):
    assert run([wrapped(image(0))])[0] == run([((image(0),), {})])[0]


def test_order_of_the_tensors_and_of_the_micro_batches_counts():
    a, b = image(0), image(1)
    assert digest(a, b) != digest(b, a)
    one, _ = run([((a,), {}), ((b,), {})])
    other, _ = run([((b,), {}), ((a,), {})])
    again, _ = run([((a,), {}), ((b,), {})])
    assert one == again != other


def test_a_batch_that_a_closure_evaluates_again_counts_once():
    a, b = image(0), image(1)
    once, _ = run([((a,), {}), ((b,), {})])
    twice, _ = run([((a,), {}), ((b,), {})] * 2)
    assert once == twice


def test_zeros_of_another_size_are_another_batch():
    assert digest(torch.zeros(3, 2)) != digest(torch.zeros(4, 2))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.bfloat16])
def test_any_type(dtype):
    a, b = torch.zeros(3, 4, dtype=dtype), torch.zeros(3, 4, dtype=dtype)
    b[2, 3] = 1
    assert digest(a) != digest(b)


def test_memory_that_is_used_again_does_not_matter():
    buffer = torch.empty(4, 3, 5)
    model = Net()
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.1), probes=[Batch])
    try:
        for seed in (0, 1):
            buffer.copy_(image(seed))
            output = model(buffer)
            buffer.zero_()
            output.backward()
            harness.optimizer.step()
    finally:
        harness.close()
    assert [s.digests["batch"] for s in harness.steps] == [digest(image(0)), digest(image(1))]


def test_samples_and_tokens_of_all_micro_batches():
    ids = torch.randint(0, 9, (4, 7))
    call = ((), {"input_ids": ids, "attention_mask": torch.ones(4, 7, dtype=torch.bool)})
    _, harness = run([call, call], [((image(0),), {})])
    scalars = harness.steps[0].scalars
    counts = {name: value for name, value in scalars.items() if "moments" not in name}
    assert counts == {"samples": 8, "tokens": 56, "sample_elements": 7}
    assert {n for n in harness.steps[1].scalars if "moments" not in n} == {
        "samples",
        "input_rms",
        "input_spread",
        "sample_elements",
    }


def test_evaluation_and_passes_without_gradients_do_not_count():
    model = Net()
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.1), probes=[Batch])
    try:
        with torch.no_grad():
            model(image(7))
            model.eval()
            model(image(8))
        model.eval()
        model(image(9))
        model.train()
        model(image(0)).backward()
        harness.optimizer.step()
    finally:
        harness.close()
    assert harness.steps[0].digests["batch"] == digest(image(0))
    assert harness.steps[0].scalars["samples"] == 4


def test_what_is_no_plain_tensor_and_nothing_at_all():
    assert digest(torch.ones(3).to_sparse()) is None
    assert digest() is None
    assert digest(torch.ones(3).to_sparse(), image(0)) == digest(image(0))


def test_batches_of_changing_shape():
    sizes = [3, 5, 3, 8]
    digests, harness = run(*([((image(1, size),), {})] for size in sizes))
    assert digests[0] == digests[2]
    assert len(set(digests)) == 3
    assert [s.scalars["samples"] for s in harness.steps] == sizes


def digested_now_and_then(images):
    """Digests of steps of which every fourth is sampled and the others are not."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    harness = Harness(model, optimizer, probes=[Batch])
    enter = harness.context.schedule.plan
    harness.context.schedule.plan = lambda step: (True, *(step % 4 == 0,) * 4)
    try:
        harness.context.enter()
        for given in images:
            model(given).backward()
            harness.optimizer.step()
    finally:
        harness.close()
        harness.context.schedule.plan = enter
    return [s.digests for s in harness.steps]


def test_small_batches_are_digested_at_every_step():
    digests = digested_now_and_then([image(seed) for seed in (0, 1, 2, 0, 1, 2)])
    assert [w["batch"] for w in digests] == [digest(image(seed)) for seed in (0, 1, 2, 0, 1, 2)]
    assert [step for step, w in enumerate(digests) if "rows/0" in w] == [0, 4]
    assert not any(BATCH_PART in w for w in digests)


def test_of_large_batches_a_part_is_digested_at_every_step():
    images = [image(seed, size=400) for seed in (0, 1, 2, 0, 1, 2)]
    digests = digested_now_and_then(images)
    assert [step for step, w in enumerate(digests) if "batch" in w] == [0, 4]
    parts = [w[BATCH_PART] for w in digests]
    assert parts[:3] == parts[3:]
    assert len(set(parts)) == 3


def test_a_large_batch_that_lies_scattered_is_digested_at_sampled_steps_alone():
    digests = digested_now_and_then([image(0, size=400).transpose(0, 1)] * 5)
    assert [sorted(w)[:1] for w in digests] == [["batch"], [], [], [], ["batch"]]


def test_another_sample_of_a_large_batch_shows_in_its_part():
    changed = image(0, size=400)
    changed[123] += 1
    digests = digested_now_and_then([image(0, size=400), changed])
    assert digests[0][BATCH_PART] != digests[1][BATCH_PART]


def sizes_of(*steps):
    _, harness = run(*steps)
    return [s.scalars.get("input_rms") for s in harness.steps]


def test_the_size_of_the_inputs_is_their_root_mean_square():
    once, twice = image(0), 3 * image(0)
    whole = float(once.square().mean().sqrt())
    first, second, both = sizes_of(
        [((once,), {})], [((twice,), {})], [((once,), {}), ((twice,), {})]
    )
    assert first == pytest.approx(whole, rel=1e-6)
    assert second == pytest.approx(3 * whole, rel=1e-6)
    assert both == pytest.approx(2 * whole, rel=1e-6)


def test_of_large_inputs_a_part_from_all_over_them_is_measured():
    large = torch.randn(64, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    large[32:] *= 5
    (size,) = sizes_of([((large,), {})])
    assert size == pytest.approx(float(large.square().mean().sqrt()), rel=0.05)


def test_tokens_are_not_measured_and_half_precision_does_not_overflow():
    tokens = torch.arange(12).view(3, 4)
    assert sizes_of([((tokens,), {})]) == [None]
    (size,) = sizes_of([((tokens, torch.full((4, 8), 6e4, dtype=torch.float16)), {})])
    assert size == pytest.approx(6e4, rel=1e-3)


def scalars_of(inputs, loader=None):
    """What one step says of a batch of a DataLoader, or of one that is given."""
    model = Net()
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.1), probes=[Batch, Loss])
    try:
        (given,) = next(iter(loader)) if loader is not None else (inputs,)
        model(given).sum().backward()
        harness.optimizer.step()
    finally:
        harness.close()
    return harness.steps[0].scalars


def test_what_there_is_beside_the_batch():
    data = torch.randn(100, 6)
    loader = DataLoader(TensorDataset(data), batch_size=10)
    assert scalars_of(None, loader)["loader_batches"] == 10
    assert scalars_of(data[:10])["samples_stored"] == 100
    alone = scalars_of(data.clone()[:])
    assert "loader_batches" not in alone
    assert "samples_stored" not in alone


@pytest.mark.parametrize("workers", [0, 2])
def test_whether_a_loader_has_processes_of_its_own(workers):
    loader = DataLoader(TensorDataset(torch.randn(100, 6)), batch_size=10, num_workers=workers)
    assert scalars_of(None, loader).get("loader_workers", 0) == workers


def test_a_loader_of_other_batches_says_nothing():
    loader = DataLoader(TensorDataset(torch.randn(100, 6)), batch_size=10)
    iter(loader)
    assert "loader_batches" not in scalars_of(torch.randn(7, 6))


def test_samples_that_are_all_alike():
    assert scalars_of(torch.ones(8, 3, 5) * torch.arange(5.0))["input_spread"] == 0
    assert scalars_of(torch.randn(8, 3, 5))["input_spread"] == pytest.approx(0.94, abs=0.1)
    assert scalars_of(torch.randn(8, 3, 5))["sample_elements"] == 15
    assert "input_spread" not in scalars_of(torch.randn(1, 5))
    # The border of an image is the same in all of them.
    images = torch.zeros(64, 1, 28, 28)
    images[:, :, 4:24, 4:24] = torch.randn(64, 1, 20, 20)
    assert scalars_of(images)["input_spread"] == pytest.approx(1.0, abs=0.1)


def test_how_the_inputs_are_distributed():
    scalars = scalars_of(torch.randn(32, 3, 5))
    assert sum(name.startswith("input_moments/") for name in scalars) == 12
    # Mean squares of projections of length 1 of normal numbers.
    assert scalars["input_moments/4"] == pytest.approx(1, abs=0.6)
    tokens = scalars_of(torch.arange(40).reshape(4, 10))
    assert sum(name.startswith("token_moments/") for name in tokens) == 12
    assert not any(name.startswith("input_moments/") for name in tokens)
