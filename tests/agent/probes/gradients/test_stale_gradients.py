"""Gradients of the step before that are still there, in real training loops."""

import pytest
import torch
from torch import nn

from rankscope.agent.probes.gradients.stale import StaleGradients
from tests.support.probe_harness import Harness


def reported(step, steps=4, sampled=None, model=None):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    harness = Harness(model, optimizer, probes=(StaleGradients,), sampled=sampled)
    for number in range(steps):
        step(model, optimizer, number)
    harness.close()
    assert not any(p._backward_hooks for p in model.parameters())
    return [
        None if (v := facts.scalars.get("gradient_carried")) is None else float(v)
        for facts in harness.steps
    ]


def loss(model):
    return model(torch.ones(2, 3)).pow(2).sum()


@pytest.mark.parametrize(
    "zero",
    [
        lambda m, o: o.zero_grad(),
        lambda m, o: o.zero_grad(set_to_none=False),
        lambda m, o: [p.grad.data.zero_() for p in m.parameters() if p.grad is not None],
        lambda m, o: m.zero_grad(),
    ],
    ids=["none", "zero", "data", "model"],
)
@pytest.mark.parametrize("late", [False, True])
def test_no_gradient_is_stale_where_gradients_are_set_to_zero(zero, late):
    def step(model, optimizer, number):
        if not late:
            zero(model, optimizer)
        made = loss(model)
        if late:
            zero(model, optimizer)
        made.backward()
        optimizer.step()

    assert reported(step) == [0.0] * 4


def test_what_is_stale_is_the_gradient_of_the_step_before():
    norms = []

    def step(model, optimizer, number):
        loss(model).backward()
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        optimizer.step()

    assert reported(step) == pytest.approx([0.0, *norms[:-1]], rel=1e-5)


def test_from_one_step_on():
    def step(model, optimizer, number):
        if number < 2:
            optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    assert [value > 0 for value in reported(step)] == [False, False, True, True]


def test_micro_batches_add_up_within_a_step():
    def step(model, optimizer, number):
        optimizer.zero_grad()
        for _ in range(3):
            loss(model).backward()
        optimizer.step()

    assert reported(step) == [0.0] * 4


def test_another_networks_loss_that_reaches_these_parameters_before():
    generator = nn.Linear(3, 3)

    def step(model, optimizer, number):
        model(generator(torch.ones(2, 3))).sum().backward()
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    assert reported(step) == [0.0] * 4


def test_only_sampled_steps_are_observed():
    def step(model, optimizer, number):
        loss(model).backward()
        optimizer.step()

    assert [v is None for v in reported(step, sampled=lambda s: s % 2 == 1)] == [True, False] * 2


def test_large_parameters_are_left_alone():
    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 70_000, bias=False)

        def forward(self, x):
            return self.inner(x)

    def step(model, optimizer, number):
        loss(model).backward()
        optimizer.step()

    assert reported(step, model=Large()) == [None] * 4


def test_what_is_carried_of_distributed_gradients(tmp_path):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    norms = []

    def step(model, optimizer, number):
        if number == 3:
            optimizer.zero_grad()
        model(torch.ones(2, 6)).square().sum().backward()
        norms.append(
            float(torch.nn.utils.get_total_norm([p.grad._local_tensor for p in model.parameters()]))
        )
        optimizer.step()

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        parallelize_module(model, mesh, {"0": ColwiseParallel()})
        assert reported(step, model=model) == pytest.approx([0.0, *norms[:2], 0.0], rel=1e-5)
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture
def sharded(tmp_path):
    from tests.support.fully_sharded import fully_shard

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        yield model
    finally:
        torch.distributed.destroy_process_group()


def local_norm(model):
    return float(torch.nn.utils.get_total_norm([p.grad._local_tensor for p in model.parameters()]))


def test_what_is_carried_under_fsdp(sharded):
    norms = []

    def step(model, optimizer, number):
        if number not in (2, 3):
            optimizer.zero_grad()
        loss(model).backward()
        norms.append(local_norm(model))
        optimizer.step()

    found = reported(step, steps=5, model=sharded)
    assert found == pytest.approx([0.0, 0.0, norms[1], norms[2], 0.0], rel=1e-5)


@pytest.mark.parametrize("to_none", [False, True])
def test_gradients_that_are_set_to_zero_after_the_forward_pass_under_fsdp(to_none, sharded):
    def step(model, optimizer, number):
        made = loss(model)
        optimizer.zero_grad(set_to_none=to_none)
        made.backward()
        optimizer.step()

    assert reported(step, model=sharded) == [0.0] * 4


def test_micro_batches_add_up_within_a_step_under_fsdp(sharded):
    def step(model, optimizer, number):
        optimizer.zero_grad(set_to_none=False)
        for _ in range(3):
            loss(model).backward()
        optimizer.step()

    assert reported(step, model=sharded) == [0.0] * 4
