"""Two ranks that resume from a checkpoint, one of them without the state of its optimizer.

RANK=0 WORLD_SIZE=2 python resumed_job.py all|weights
"""

from __future__ import annotations

import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from rankscope import agent

BEFORE, AFTER = 20, 30


def main(restored):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = torch.Generator().manual_seed(rank)
    model, optimizer = made()
    train(model, optimizer, BEFORE, data)
    checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model, optimizer = made()
    model.load_state_dict(checkpoint[0])
    if restored == "all" or rank == 0:
        optimizer.load_state_dict(checkpoint[1])
    agent.attach(model, optimizer)
    train(model, optimizer, AFTER, data)
    dist.destroy_process_group()


def made():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def train(model, optimizer, steps, data):
    for _ in range(steps):
        x, y = torch.randn(16, 8, generator=data), torch.randint(3, (16,), generator=data)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1])
