"""A job of two ranks, one of which may have its labels exchanged from the first step on.

RANK=0 WORLD_SIZE=2 python exchanged_job.py exchanged 300
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from rankscope import agent

FEATURES, CLASSES, BATCH = 16, 8, 32


def main() -> None:
    kind, steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    agent.attach(model, optimizer)
    truth = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(1))
    data = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        x = torch.randn(8 * BATCH, FEATURES, generator=data)
        y = (x @ truth).argmax(dim=1)
        # Classes of their own, which are there to be learned by both.
        mine = y % 2 == rank if kind == "classes" else y >= 0
        x, y = x[mine][:BATCH], y[mine][:BATCH]
        if kind == "exchanged" and rank == 1:
            y = (y + 3) % CLASSES
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
