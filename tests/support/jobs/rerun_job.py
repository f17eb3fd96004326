"""A short training, as CI runs it again and again: `rerun_job.py HOW`, one rank a process.

HOW is `clean`; `apart`, in which the last rank changes its weights outside the optimizer since step
20; or `raises`, in which it raises before its first step.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from rankscope import agent

HOW = sys.argv[1]
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WRONG = RANK == RANKS - 1


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    agent.attach(model, optimizer)
    if HOW == "raises" and WRONG:
        raise ValueError("no such file")
    generator = torch.Generator().manual_seed(RANK)
    for step in range(80):
        x = torch.randn(16, 8, generator=generator)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
        optimizer.step()
        if HOW == "diverges" and WRONG and step >= 20:
            with torch.no_grad():
                model.module[0].weight.mul_(1.001)
    dist.barrier()


if __name__ == "__main__":
    main()
