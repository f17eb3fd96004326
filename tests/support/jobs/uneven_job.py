"""A data-parallel job whose ranks have inputs of different length, in torch's `Join`.

RANK=0 WORLD_SIZE=2 python uneven_job.py plain|accumulating|sharded
"""

from __future__ import annotations

import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from rankscope import agent

FEATURES, CLASSES, EPOCHS = 8, 4, 3
# Micro-batches of each rank in an epoch.
BATCHES = (12, 20)
MICRO = 2


def train(way: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(FEATURES, CLASSES))
    joinables = [model]
    if way == "sharded":
        # Warns of torch.jit when it is imported.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        joinables.append(optimizer)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    agent.attach(model, optimizer)
    micro = MICRO if way == "accumulating" else 1
    for epoch in range(EPOCHS):
        generator = torch.Generator().manual_seed(100 * epoch + rank)
        with Join(joinables):
            for i in range(BATCHES[rank]):
                x = torch.randn(16, FEATURES, generator=generator)
                y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
                steps = i % micro == micro - 1
                with contextlib.nullcontext() if steps else model.no_sync():
                    functional.cross_entropy(model(x), y).backward()
                if steps:
                    optimizer.step()
                    optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    train(sys.argv[1])
