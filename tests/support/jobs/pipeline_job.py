"""A pipeline of two stages by hand, a rank each: the second one waits for the first.

RANK=0 WORLD_SIZE=2 python pipeline_job.py 60
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from rankscope import agent

WAIT = 0.03  # seconds that the first stage computes before it sends


class Slow(nn.Module):
    """What takes a while on the way forward."""

    def forward(self, x):
        time.sleep(WAIT)
        return x


def main(steps):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 3))
    part = nn.Sequential(*whole[:2], Slow()) if rank == 0 else whole[2:]
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    agent.attach(part, optimizer)
    data = torch.Generator().manual_seed(7)
    for _ in range(steps):
        x, y = torch.randn(12, 8, generator=data), torch.randint(3, (12,), generator=data)
        optimizer.zero_grad()
        if rank == 0:
            hidden = part(x)
            dist.send(hidden.detach(), 1)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, 1)
            hidden.backward(gradient)
        else:
            received = torch.empty(12, 16)
            dist.recv(received, 0)
            received.requires_grad_()
            functional.cross_entropy(part(received), y).backward()
            dist.send(received.grad, 0)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
