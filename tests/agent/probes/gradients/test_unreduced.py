"""Gradients that FSDP2 keeps unreduced when the optimizer steps."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rankscope.agent.probes.gradients.unreduced import UnreducedGradients
from tests.support.fully_sharded import Shard, fully_shard
from tests.support.probe_harness import Harness


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize(("reduced", "left"), [(1, 0.0), (0, 4.0)])
def test_what_the_last_micro_batch_leaves(mesh, reduced, left):
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    harness = Harness(model, optimizer, probes=(UnreducedGradients,))
    for _ in range(3):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == reduced)
            model(torch.ones(5, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [facts.scalars["gradients_unreduced"] for facts in harness.steps] == [left] * 3


def test_modules_whose_parameters_are_sharded_over_several_meshes(mesh):
    sharding = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    if not hasattr(sharding, "ShardPlacementResult"):
        pytest.skip("this version of torch has one mesh for each module")
    # As of experts, which have a mesh of their own.
    other = DeviceMesh.from_group(dist.new_group([0]), "cpu")
    meshes = [sharding.FSDPMeshInfo(one, shard_mesh_dim=0) for one in (mesh, other)]
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    experts = set(model[2].parameters())

    def place(parameter):
        return sharding.ShardPlacementResult(Shard(0), meshes[parameter in experts])

    fully_shard(model, mesh=mesh, shard_placement_fn=place)
    harness = Harness(
        model, torch.optim.SGD(model.parameters(), lr=0.1), probes=(UnreducedGradients,)
    )
    model.set_requires_gradient_sync(False)
    model(torch.ones(5, 4)).square().sum().backward()
    harness.optimizer.step()
    assert harness.steps[0].scalars == {"gradients_unreduced": 4.0}


def test_of_other_models_nothing_is_said():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    harness = Harness(model, optimizer, probes=(UnreducedGradients,))
    model(torch.ones(5, 4)).sum().backward()
    optimizer.step()
    assert not harness.steps[0].scalars
