"""Trainings of every usual kind, each from a fixed seed, that draw from every random generator.

Each function trains for a number of rounds and returns everything that training has made: what is
compared bit for bit between a training that is watched and one that is not.
"""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from tests.support.jobs.ending import end_at_once

FEATURES, CLASSES, BATCH = 6, 3, 8


def seeded():
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


def drawn(*shape):
    """A batch for which all three generators are drawn from, as augmentation does."""
    x = torch.randn(BATCH, *shape) * random.uniform(0.9, 1.1)
    x = x[torch.from_numpy(np.random.permutation(BATCH))]
    return x, (x.flatten(1).sum(1) * 10).long().remainder(CLASSES)


def bits(value):
    """A value with every tensor and float in it replaced by its bytes, so that `==` is exact."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), raw.numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return {key: bits(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [bits(one) for one in value]
    return value.hex() if isinstance(value, float) else value


def outcome(models, optimizers, losses, **more):
    return {
        "models": bits([m.state_dict() for m in models]),
        "gradients": bits([[p.grad for p in m.parameters()] for m in models]),
        "optimizers": bits([o.state_dict() for o in optimizers]),
        "losses": bits(losses),
        "torch": bits(torch.get_rng_state()),
        "numpy": bits(np.random.get_state()),
        "python": random.getstate(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        **bits(more),
    }


def mlp(watch, rounds):
    """Dropout, AdamW, a schedule, and an evaluation now and then."""
    seeded()
    model = nn.Sequential(
        nn.Linear(FEATURES, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, CLASSES)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, rounds)
    watch(model, optimizer)
    losses, evaluated = [], []
    for index in range(rounds):
        x, y = drawn(FEATURES)
        loss = functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if index % 50 == 49:
            model.eval()
            with torch.no_grad():
                evaluated.append(functional.cross_entropy(model(x), y).item())
            model.train()
    return outcome([model], [optimizer], losses, evaluated=evaluated)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, stride=2)
        self.again = nn.BatchNorm2d(4)
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        return self.last(self.again(self.second(x)).relu().mean((2, 3)))


def cnn(watch, rounds):
    """BatchNorm's running statistics, momentum, channels-last memory."""
    seeded()
    model = Convolutions().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    watch(model, optimizer)
    losses = []
    for _ in range(rounds):
        x, y = drawn(2, 8, 8)
        optimizer.zero_grad(set_to_none=False)
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return outcome([model], [optimizer], losses)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens)))


MICRO = 2
OVERFLOWS = (20, 121)  # rounds whose gradients are infinite: the scaler skips the step


def transformer(watch, rounds):
    """Autocast to bfloat16, GradScaler with skipped steps, accumulation, tied weights."""
    seeded()
    model = Transformer()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=30)
    watch(model, optimizer)
    losses = []
    for index in range(rounds):
        optimizer.zero_grad()
        for _ in range(MICRO):
            tokens = torch.randint(0, 11, (4, 7))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                scores = model(tokens[:, :-1])
                loss = functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
            losses.append(loss.item())
            if index in OVERFLOWS:
                loss = loss * float("inf")
            scaler.scale(loss / MICRO).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return outcome([model], [optimizer], losses, scaler=scaler.state_dict())


def gan(watch, rounds):
    """Two models, two optimizers, one of them watched by each monitor."""
    seeded()
    generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, FEATURES))
    discriminator = nn.Sequential(nn.Linear(FEATURES, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    makes = torch.optim.Adam(generator.parameters(), lr=0.002, betas=(0.5, 0.99))
    judges = torch.optim.RMSprop(discriminator.parameters(), lr=0.001)
    watch(generator, makes)
    watch(discriminator, judges)
    losses = []
    for _ in range(rounds):
        real, _ = drawn(FEATURES)
        ones, zeros = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)
        judges.zero_grad()
        made = generator(torch.randn(BATCH, 4))
        on_real = functional.binary_cross_entropy_with_logits(discriminator(real), ones)
        on_made = functional.binary_cross_entropy_with_logits(discriminator(made.detach()), zeros)
        judged = on_real + on_made
        judged.backward()
        judges.step()
        makes.zero_grad()
        fooled = functional.binary_cross_entropy_with_logits(discriminator(made), ones)
        fooled.backward()
        makes.step()
        losses += [fooled.item(), judged.item()]
    return outcome([generator, discriminator], [makes, judges], losses)


def lbfgs(watch, rounds):
    """A closure that is called several times a step, with dropout in it."""
    seeded()
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, CLASSES))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=5)
    watch(model, optimizer)
    losses = []
    for _ in range(rounds):
        x, y = drawn(FEATURES)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return outcome([model], [optimizer], losses)


def ddp(watch, rounds):
    """A model under DistributedDataParallel, with BatchNorm buffers and accumulation."""
    seeded()
    rank = torch.distributed.get_rank()
    model = nn.parallel.DistributedDataParallel(Convolutions())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    watch(model, optimizer)
    torch.manual_seed(100 + rank)  # each rank has data of its own
    losses = []
    for _ in range(rounds):
        optimizer.zero_grad()
        with model.no_sync():
            x, y = drawn(2, 8, 8)
            functional.cross_entropy(model(x), y).backward()
        x, y = drawn(2, 8, 8)
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return outcome([model], [optimizer], losses)


def ddp_worker(rank, folder, url, rounds):
    """Trains without the agent and with it; leaves both outcomes, and what failed, in a file."""
    from rankscope import agent
    from rankscope.agent import guard

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    faults = []
    guard.observers.append(lambda probe, fault: faults.append((probe, repr(fault))))
    plain = ddp(lambda model, optimizer: None, rounds)
    monitors = []

    def watch(model, optimizer):
        options = {"server": url, "run": "ddp", "spool": f"{folder}/spool", "overhead": 1.0}
        monitors.append(agent.attach(model, optimizer, **options))
        monitors[0]._schedule.ask_dense(rounds)

    watched = ddp(watch, rounds)
    monitors[0].close()
    torch.save((plain, watched, faults), f"{folder}/{rank}")
    torch.distributed.destroy_process_group()
    end_at_once()
