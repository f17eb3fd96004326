"""Two processes under DistributedDataParallel of which one is late once."""

import time

import torch
from support.ending import end_at_once
from support.probe_harness import Harness
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankscope.agent.probes.timing import CollectiveWait

DELAY = 0.05


def worker(rank, folder, results):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    model = DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    harness = Harness(model, optimizer, probes=[CollectiveWait])
    for step in range(3):
        loss = model(torch.ones(4, 3)).sum()
        if rank == 1 and step == 2:
            time.sleep(6 * DELAY)
        loss.backward()
        optimizer.step()
    waited = [s.scalars.get("wait_seconds") for s in harness.steps]
    harness.close()
    hooks = [p._backward_hooks for p in model.parameters()]
    results.put((rank, waited, [bool(h) for h in hooks]))
    torch.distributed.destroy_process_group()
    end_at_once(results)
