"""Two processes of which one is late once, and where they average."""

import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankscope.agent.probes.machine.timing import CollectiveWait
from rankscope.agent.steps.hooks import RootHook
from tests.support.device_events import FakeEvents
from tests.support.fully_sharded import fully_shard
from tests.support.jobs.ending import end_at_once
from tests.support.probe_harness import Harness

DELAY = 0.05


def worker(rank, folder, results, where="wrapper", on_device=False):
    """One of two ranks.

    Args:
        where: they average in DistributedDataParallel (`wrapper`), in FSDP2 (`shards`), reduce
            their gradients themselves
            (`trainer`), or average their parameters after the step (`afterwards`).
        on_device: by events of a device that is two marks behind.
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
    if on_device:
        # The hooks of the first step ask for it when a gradient is there.
        harness.context.events = events = FakeEvents(behind=2)
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
    if on_device:
        assert not any("wait_seconds" in facts.scalars for facts in harness.steps)
        events.behind = 0
        for facts in harness.steps:
            for pending, deliver in facts.later:
                assert pending.ready()
                deliver()
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
