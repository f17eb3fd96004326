"""Two views of each sample, whose representations attract each other: with negatives, or without.

RANK=0 WORLD_SIZE=1 python views_jobs.py two-passes attracted
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn import functional

from rankscope import agent

STEPS, SAMPLES = 320, 64


def views(step):
    """Samples around centres of their own, twice, with noise of their own."""
    centres = 1.2 * torch.randn(5, 16, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(1000 + step)
    x = centres[torch.randint(0, 5, (SAMPLES,), generator=generator)]
    x = x + torch.randn(x.shape, generator=generator)
    return [x + 0.1 * torch.randn(x.shape, generator=generator) for _ in range(2)]


def attracted(one, other):
    return (1 - functional.cosine_similarity(one, other)).mean()


def stopped(one, other):
    """Each in turn is the target of the other: no less a collapse, without a predictor."""
    return functional.mse_loss(one, other.detach()) + functional.mse_loss(other, one.detach())


def contrasted(one, other):
    scores = functional.normalize(one, dim=1) @ functional.normalize(other, dim=1).T
    return functional.cross_entropy(scores / 0.2, torch.arange(SAMPLES))


def by_hand(one, other):
    scores = functional.normalize(one, dim=1) @ functional.normalize(other, dim=1).T / 0.2
    return (scores.logsumexp(1) - scores.diagonal()).mean()


def main(passes, loss):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    agent.attach(model, optimizer)
    for step in range(STEPS):
        one, other = views(step)
        if passes == "one-pass":
            one, other = model(torch.cat((one, other))).chunk(2)
        else:
            one, other = model(one), model(other)
        optimizer.zero_grad()
        loss(one, other).backward()
        optimizer.step()


if __name__ == "__main__":
    losses = {f.__name__: f for f in (attracted, stopped, contrasted, by_hand)}
    main(sys.argv[1], losses[sys.argv[2]])
