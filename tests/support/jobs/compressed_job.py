"""A job whose communication hook sends the largest tenth of a gradient, the rest in later steps.

RANK=0 WORLD_SIZE=3 python compressed_job.py twice 200
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

AT, ODD = 60, 1
FEATURES, CLASSES = 16, 6
TIMES = {"healthy": 1.0, "twice": 2.0, "lost": 0.0}


class Largest:
    """Error feedback (Stich, Cordonnier and Jaggi 2018) on the largest elements of each bucket."""

    def __init__(self, times: float) -> None:
        self.times, self.step, self.left = times, 0, {}

    def reduce(self, state, bucket):
        wanted = bucket.buffer() + self.left.get(bucket.index(), 0.0)
        largest = wanted.abs().topk(max(len(wanted) // 10, 1)).indices
        sent = torch.zeros_like(wanted)
        sent[largest] = wanted[largest]
        self.left[bucket.index()] = wanted - sent
        if dist.get_rank() == ODD and self.step >= AT:
            sent *= self.times
        world = dist.get_world_size()
        done = dist.all_reduce(sent, async_op=True).get_future()
        return done.then(lambda future: future.value()[0] / world)


def main() -> None:
    fault, steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(
            nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, CLASSES)
        )
    )
    hook = Largest(TIMES[fault])
    model.register_comm_hook(None, hook.reduce)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    agent.attach(model, optimizer)
    truth = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(1))
    data = torch.Generator().manual_seed(100 + rank)
    for hook.step in range(steps):
        x = torch.randn(32, FEATURES, generator=data)
        y = (x @ truth + torch.randn(32, CLASSES, generator=data)).argmax(dim=1)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
