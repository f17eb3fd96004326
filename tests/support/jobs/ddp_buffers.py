"""A model with buffers, and two processes that train it under DistributedDataParallel."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankscope.agent.probes.parameters.buffers import Buffers
from tests.support.jobs.ending import end_at_once
from tests.support.probe_harness import Harness


class Net(nn.Module):
    """Statistics, an integer counter, and a mask of whole numbers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.tensor([1, 0, 1]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.seen = None

    def forward(self, x):
        # What the forward pass begins with.
        self.seen = [b.clone() for b in self.buffers()]
        return self.norm(self.linear(x)) * self.mask


def made():
    torch.manual_seed(0)
    return Net()


def train_step(model, optimizer, seed):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


def digest(harness, step=-1):
    return harness.steps[step].digests["buffers"]


def worker(rank, folder, results):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    model = DistributedDataParallel(made())
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.01), probes=[Buffers])
    for step in range(3):
        train_step(model, harness.optimizer, 10 * step + rank)
    ended = [b.tolist() for b in model.module.buffers()]
    hooks = len(model.module._forward_pre_hooks)
    harness.close()
    results.put((rank, [digest(harness, i) for i in range(3)], ended, hooks))
    torch.distributed.destroy_process_group()
    end_at_once(results)
