"""Backward passes of a model that FSDP2 shards: which of them the optimizer steps with."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from rankscope.agent.probes.loss.training import Loss
from tests.support.fully_sharded import fully_shard
from tests.support.probe_harness import Harness


@pytest.fixture
def model(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    yield model
    dist.destroy_process_group()


def trained(model, passes):
    """What was posted of each step; `passes` are what is done around each backward pass."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    harness = Harness(model, optimizer, probes=(Loss,))
    for index, does in enumerate(passes):
        if "z" in does:
            optimizer.zero_grad()
        model.set_requires_gradient_sync("u" not in does)
        model(torch.full((5, 4), 1.0 + index)).square().mean().backward()
        if "s" in does:
            optimizer.step()
    harness.close()
    return [(s.scalars.get("passes_discarded", 0), s.shared["micro_steps"]) for s in harness.steps]


def test_gradients_that_were_thrown_away_before_the_step(model):
    assert trained(model, ["zs", "zs", "z", "zs", "z", "z", "zs"]) == [
        (0, 1),
        (0, 1),
        (1, 1),
        (2, 1),
    ]


def test_micro_batches_that_are_reduced_each(model):
    assert trained(model, ["z", "", "s", "z", "", "s"]) == [(0, 3), (0, 3)]


def test_micro_batches_whose_gradients_nobody_sees_before_the_last(model):
    assert trained(model, ["zu", "u", "s", "zu", "u", "s"]) == [(0, 3), (0, 3)]
