"""A classifier whose parameter groups have learning rates of their own; one process is enough.

RANK=0 WORLD_SIZE=1 python group_jobs.py head 300
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn import functional

from rankscope import agent

STEPS, ADDED = 160, 40
RATE = 1e-3


def batch(step):
    """Classes around centres of their own."""
    centres = 1.2 * torch.randn(5, 16, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(1000 + step)
    y = torch.randint(0, 5, (64,), generator=generator)
    return centres[y] + torch.randn(64, 16, generator=generator), y


def main(which, times):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5)
    )
    odd = model[{"first": 0, "middle": 2, "head": 4, "added": 4}[which]]
    own = {"params": list(odd.parameters()), "lr": RATE * times}
    rest = [p for module in model if module is not odd for p in module.parameters()]
    added = which == "added"
    odd.requires_grad_(not added)
    optimizer = torch.optim.Adam([{"params": rest}, *([] if added else [own])], lr=RATE)
    agent.attach(model, optimizer)
    for step in range(STEPS):
        if added and step == ADDED:
            odd.requires_grad_(True)
            optimizer.add_param_group(own)
        x, y = batch(step)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
