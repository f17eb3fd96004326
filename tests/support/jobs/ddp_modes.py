"""A DDP job with dropout and batch norm that evaluates, and forgets `model.train()` on some ranks.

Arguments: server, run, first step after the evaluation, ranks that forget (`1`, `0,1,2`, `-`).
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from rankscope import agent

STEPS = 48


def main(url, run, after, forget):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(0)
    inner = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
    )
    if forget == "-":
        # Frozen on purpose: with the statistics of what it has been trained on.
        inner(torch.randn(256, 8))
        inner[1].eval()
    model = nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    agent.attach(model, optimizer, server=url, run=run, overhead=1.0)
    generator = torch.Generator().manual_seed(rank + 1)
    for step in range(STEPS):
        if step == after:
            model.eval()
            with torch.no_grad():
                x = torch.randn(32, 8, generator=generator)
                functional.cross_entropy(model(x), x[:, :3].argmax(1))
            if str(rank) not in forget.split(","):
                model.train()
                if forget == "-":
                    inner[1].eval()
        x = torch.randn(32, 8, generator=generator)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
