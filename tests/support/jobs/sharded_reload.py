"""Two ranks under FSDP2 that record the digests of their shards, and load them again."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from rankscope.agent.checkpoint_digests import Place, checkpoint
from tests.support.fully_sharded import fully_shard


def made(ranks):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 6))
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    return model


def worker(rank, folder, ranks=2):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks
    )
    path, at = f"{folder}/saved", Place("run", 3, rank, ranks)
    model = made(ranks)
    checkpoint(path, {"model": model.state_dict()}, at, loaded=False)
    same = checkpoint(path, {"model": model.state_dict()}, at, loaded=True)
    whole = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    if rank == 1:
        with torch.no_grad():
            model[0].weight.to_local()[2, 1] += 1e-3
    stale = checkpoint(path, {"model": model.state_dict()}, at, loaded=True)
    found = {
        "same": [same.same, same.tensors],
        "stale": stale.differing,
        "whole": list(checkpoint(path, {"model": whole}, at, loaded=True).unchecked.values()),
    }
    Path(f"{folder}/rank_{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
