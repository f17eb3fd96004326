"""Two processes of which one is late once, and where they average."""

import time

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from rankscope.agent.probes.machine.timing import CollectiveWait
from rankscope.agent.steps.hooks import RootHook
from tests.support.jobs.ending import end_at_once
from tests.support.probe_harness import Harness

DELAY = 0.05


def worker(rank, folder, results, where="wrapper"):
    """One of two ranks.

    Args:
        where: they average in DistributedDataParallel (`wrapper`), in FSDP2 (`shards`), reduce
            their gradients themselves
            (`trainer`), or average their parameters after the step (`afterwards`).
    """
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    model = nn.Linear(3, 2)
    if where == "shards":
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    if where == "wrapper":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    harness = Harness(model, optimizer, probes=[CollectiveWait])
    for step in range(3):
        loss = model(torch.ones(4, 3)).sum()
        if rank == 1 and step == 2:
            time.sleep(6 * DELAY)
        loss.backward()
        if where == "trainer":
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
        optimizer.step()
        if where == "afterwards":
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.data)
    waited = [s.scalars.get("wait_seconds") for s in harness.steps]
    harness.close()
    hooks = [p._backward_hooks for p in model.parameters()]
    hooks += [
        [h for h in m._forward_pre_hooks.values() if isinstance(h, RootHook)]
        for m in model.modules()
    ]
    results.put((rank, waited, [bool(h) for h in hooks]))
    torch.distributed.destroy_process_group()
    end_at_once(results)
