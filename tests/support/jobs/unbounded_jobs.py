"""Losses that go below 0: without a least value by a mistake, and by their nature.

RANK=0 WORLD_SIZE=1 python unbounded_jobs.py ranking-sign
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn import functional

from rankscope import agent

STEPS = 320


def numbers(step, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + step))


class Ranking(nn.Module):
    """Embeddings of users and items: the Bayesian personalised ranking loss of random triples."""

    def __init__(self, sign):
        super().__init__()
        self.sign = sign
        self.users, self.items = nn.Embedding(100, 16), nn.Embedding(200, 16)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, step):
        generator = torch.Generator().manual_seed(step)
        user = torch.randint(0, 100, (256,), generator=generator)
        seen = (2 * user + torch.randint(0, 8, (256,), generator=generator)) % 200
        other = torch.randint(0, 200, (256,), generator=generator)
        taste = self.users(user)
        margin = (taste * (self.items(seen) - self.items(other))).sum(1)
        return self.sign * functional.logsigmoid(margin).mean()


class Regression(nn.Module):
    """An error of a small network, or what stands for one."""

    def __init__(self, made):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5))
        self.made = made

    def forward(self, step):
        x = numbers(step, 64, 16)
        return self.made(self.body(x), x[:, :5].softmax(1))


class Density(nn.Module):
    """Couplings of two variables, one of which hardly varies: a density that is large."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 2)) for _ in range(4)
        )

    def forward(self, step):
        z = numbers(step, 128, 2)
        one, other = z[:, :1], 0.05 * torch.sin(z[:, :1]) + 0.02 * z[:, 1:]
        stretched = 0
        for part in self.parts:
            scale, shift = part(one).chunk(2, 1)
            one, other = other * (2 * scale.tanh()).exp() + shift, one
            stretched = stretched + 2 * scale.tanh()
        return (0.5 * (one**2 + other**2) - stretched).mean()


class Policy(nn.Module):
    """Actions that a quadratic value, which has a largest one, is to be large for."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, step):
        x = numbers(step, 64, 16)
        action = self.body(x)
        return (action.square() - 10 * x[:, :2] * action).sum(1).mean()


class Critic(nn.Module):
    """A Wasserstein critic with a gradient penalty."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, step):
        real, made = 3 + numbers(step, 64, 2), numbers(step + 10_000, 64, 2)
        between = ((real + made) / 2).requires_grad_(True)
        (slope,) = torch.autograd.grad(self.body(between).sum(), between, create_graph=True)
        penalty = 10 * (slope.norm(dim=1) - 1).square().mean()
        return self.body(made).mean() - self.body(real).mean() + penalty


JOBS = {
    "ranking": lambda: Ranking(-1),
    "ranking-sign": lambda: Ranking(1),
    "error": lambda: Regression(functional.mse_loss),
    "error-sign": lambda: Regression(lambda o, t: -functional.mse_loss(o, t)),
    "scores": lambda: Regression(lambda o, t: -(t * o).sum(1).mean()),
    "kl": lambda: Regression(lambda o, t: functional.kl_div(o.log_softmax(1), t)),
    "kl-probabilities": lambda: Regression(lambda o, t: functional.kl_div(o.softmax(1), t)),
    "density": Density,
    "policy": Policy,
    "critic": Critic,
}


def main(name):
    torch.manual_seed(0)
    model = JOBS[name]()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 if "ranking" in name else 2e-3)
    agent.attach(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1])
