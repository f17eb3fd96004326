"""Jobs of two ranks that train well in ways that look like a fault, and the faults beside them.

RANK=0 WORLD_SIZE=2 python healthy_jobs.py column-bias 100
"""

from __future__ import annotations

import math
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from rankscope import agent

AT = 61
FEATURES, HIDDEN, CLASSES = 16, 64, 10


class Copied(torch.autograd.Function):
    """The same input on all ranks: each of them has a part of its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Summed(torch.autograd.Function):
    """A sum over all ranks."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Cut(nn.Module):
    """A linear layer whose outputs, or inputs, are shared out among the ranks; biases of zeros."""

    def __init__(self, inputs, outputs, *, by, generator):
        super().__init__()
        whole = torch.randn(outputs, inputs, generator=generator) / math.sqrt(inputs)
        own = whole.chunk(dist.get_world_size(), 0 if by == "outputs" else 1)[dist.get_rank()]
        self.by = by
        self.weight = nn.Parameter(own.clone())
        self.bias = nn.Parameter(torch.zeros(len(own)))

    def forward(self, x):
        if self.by == "outputs":
            return functional.linear(Copied.apply(x), self.weight, self.bias)
        return Summed.apply(functional.linear(x, self.weight)) + self.bias


def tensor_parallel(steps, *, fault=False):
    """By hand; with the fault rank 1 has another gradient of the bias that both ranks hold."""
    drawn = torch.Generator().manual_seed(0)
    net = nn.Sequential(
        nn.LayerNorm(FEATURES),
        Cut(FEATURES, HIDDEN, by="outputs", generator=drawn),
        nn.GELU(),
        Cut(HIDDEN, CLASSES, by="inputs", generator=drawn),
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    agent.attach(net, optimizer)
    answers = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(1))
    for step in range(steps):
        x = torch.randn(32, FEATURES, generator=torch.Generator().manual_seed(100 + step))
        optimizer.zero_grad()
        functional.cross_entropy(net(x), (x @ answers).argmax(1)).backward()
        if fault and step == AT and dist.get_rank() == 1:
            net[3].bias.grad *= 2
        optimizer.step()


def two_layers(inputs, hidden, outputs):
    return nn.Sequential(
        *(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()),
        nn.Linear(hidden, outputs),
    )


class Autoencoder(nn.Module):
    """A variational one, much wider than its code."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = two_layers(64, 128, 4), two_layers(2, 128, 64)

    def forward(self, x):
        mean, spread = self.encoder(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        return self.decoder(code), mean, spread


def autoencoder(steps):
    images = torch.tensor(load_digits().data / 16, dtype=torch.float32)
    torch.manual_seed(0)
    model = DistributedDataParallel(Autoencoder())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    torch.manual_seed(1 + dist.get_rank())
    agent.attach(model, optimizer)
    for _ in range(steps):
        x = images[torch.randint(0, len(images), (64,))]
        made, mean, spread = model(x)
        error = functional.binary_cross_entropy_with_logits(made, x, reduction="sum")
        divergence = 0.5 * (mean.square() + spread.exp() - 1 - spread).sum()
        optimizer.zero_grad()
        ((error + divergence) / len(x)).backward()
        optimizer.step()


def vanishing(steps):
    """So many sigmoids that the first layers' gradients are below the smallest normal number."""
    torch.manual_seed(0)
    layers = [layer for _ in range(60) for layer in (nn.Linear(16, 16), nn.Sigmoid())]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(16, CLASSES)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    agent.attach(model, optimizer)
    for step in range(steps):
        drawn = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
        x = torch.randn(32, 16, generator=drawn)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
        optimizer.step()


def converged(steps):
    """All data at each step, in two micro-batches, to where the ranks' gradients cancel."""
    drawn = torch.Generator().manual_seed(5 + dist.get_rank())
    x = torch.randn(64, FEATURES, generator=drawn)
    y = x[:, :4] + torch.randn(64, 4, generator=drawn)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(FEATURES, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    agent.attach(model, optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        for half in (slice(None, 32), slice(32, None)):
            (functional.mse_loss(model(x[half]), y[half]) / 2).backward()
        optimizer.step()


def loaded(steps, *, dropout=0.0, workers=0):
    """One seed on all ranks, and a loader in whose order each has samples of its own."""
    torch.manual_seed(0)
    x = torch.randn(320, FEATURES)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler, num_workers=workers)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 2))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    agent.attach(model, optimizer)
    for epoch in range(steps // len(loader)):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()


def mixed(steps, *, rate=0.3, period=50, times=2):
    """Two classes that overlap, samples mixed with each other, restarts of the learning rate."""
    drawn = torch.Generator().manual_seed(7)
    centres = 0.25 * torch.randn(2, 20, generator=drawn)
    classes = torch.randint(0, 2, (20_000,), generator=drawn)
    images = centres[classes] + torch.randn(20_000, 20, generator=drawn)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(20, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2))
    )
    torch.manual_seed(1 + 50 * dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, period, times)
    agent.attach(model, optimizer)
    for _ in range(steps):
        chosen, other = torch.randint(0, len(images), (2, 32))
        share = float(torch.distributions.Beta(0.2, 0.2).sample())
        scores = model(share * images[chosen] + (1 - share) * images[other])
        losses = [functional.cross_entropy(scores, classes[which]) for which in (chosen, other)]
        optimizer.zero_grad()
        (share * losses[0] + (1 - share) * losses[1]).backward()
        optimizer.step()
        schedule.step()


JOBS = {
    "mixed": mixed,
    "mixed-long": lambda steps: mixed(steps, period=200, times=1),
    "loader": loaded,
    "loader-dropout": lambda steps: loaded(steps, dropout=0.2),
    "loader-workers": lambda steps: loaded(steps, workers=1),
    "converged": converged,
    "vanishing": vanishing,
    "autoencoder": autoencoder,
    "column-bias": tensor_parallel,
    "row-bias-fault": lambda steps: tensor_parallel(steps, fault=True),
}


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    JOBS[sys.argv[1]](int(sys.argv[2]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
