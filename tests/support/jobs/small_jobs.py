"""Small data-parallel jobs on gloo, each with one fault or none; one script for all of them.

RANK=0 WORLD_SIZE=2 python small_jobs.py one-class
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

FEATURES, CLASSES = 8, 10


def one_class(model, step, rank):
    """Cross entropy over one class: its loss is 0 whatever the parameters are."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(16, FEATURES, generator=generator)
    return functional.cross_entropy(model(x), torch.rand(16, 1, generator=generator))


def learned(model, step, rank):
    """Classes with a margin between them: once they are learned, loss and gradient are 0."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    y = torch.randint(0, 2, (16,), generator=generator)
    x = torch.rand(16, FEATURES, generator=generator) * (2.0 * y[:, None] - 1)
    return functional.multi_margin_loss(model(x), y)


EPOCH = 35
POISONED = 61


def epochs(step, rank, *, shuffled, augmented):
    """The data of a step: epochs of 35 steps, in one order or not, with random noise or not."""
    epoch, place = divmod(step, EPOCH)
    order = torch.Generator().manual_seed(epoch if shuffled else 0)
    sample = torch.randperm(EPOCH * 16 * 2, generator=order).view(EPOCH, 2, 16)[place, rank]
    images = torch.Generator().manual_seed(7)
    x = torch.randn(EPOCH * 16 * 2, FEATURES, generator=images)[sample]
    y = torch.randint(0, CLASSES, (EPOCH * 16 * 2,), generator=images)[sample]
    if augmented:
        own = torch.Generator().manual_seed(100_000 * (rank + 1) + step)
        x = x + 0.01 * torch.randn(x.shape, generator=own)
    return x, y


def ordered(shuffled, augmented):
    def loss_of(model, step, rank):
        x, y = epochs(step, rank, shuffled=shuffled, augmented=augmented)
        return functional.cross_entropy(model(x), y)

    return loss_of


def late(model, step, rank):
    """Rank 1 reads the batches that rank 0 has read five steps before."""
    generator = torch.Generator().manual_seed(
        step - 5 * rank if step >= 5 else 10_000 * rank + step
    )
    x = torch.randn(16, FEATURES, generator=generator)
    return functional.cross_entropy(model(x), torch.randint(0, CLASSES, (16,), generator=generator))


def one_batch(size):
    def loss_of(model, step, rank):
        """One and the same batch at every step."""
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(size, FEATURES, generator=generator)
        y = torch.randint(0, CLASSES, (size,), generator=generator)
        return functional.cross_entropy(model(x), y)

    return loss_of


def poisoned(model, step, rank):
    """At step 61 rank 1 puts a NaN into the reduction of one tensor; its loss is as ever."""
    bare = model.module
    if not hasattr(bare, "poison"):
        bare.poison = {"at": -1}

        def hook(gradient):
            if bare.poison["at"] == POISONED and rank == 1:
                gradient = gradient.clone()
                gradient.view(-1)[0] = float("nan")
            return gradient

        bare.bias.register_hook(hook)
    bare.poison["at"] = step
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(16, FEATURES, generator=generator)
    return functional.cross_entropy(model(x), torch.randint(0, CLASSES, (16,), generator=generator))


def jumping(model, step, rank):
    """At step 61 the logits of rank 1 are 1,000 times what it was before."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    scale = 1000.0 if step == POISONED and rank == 1 else 1.0
    logits = scale * model(torch.randn(16, FEATURES, generator=generator))
    return functional.cross_entropy(logits, torch.randint(0, CLASSES, (16,), generator=generator))


kept = []


def memory(*, leaks):
    """Batches of 2 MB at the most; rank 1 keeps a term of each step with its graph, or not.

    No backward pass goes through it (an entropy that is to be plotted, say): one would free what
    the graph holds. At every 50th step there is an evaluation, whose outputs are kept until the
    next one.
    """
    evaluated = []

    def loss_of(model, step, rank):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        size = int(torch.randint(2**15, 2**16, (), generator=generator))
        x = torch.randn(size, FEATURES, generator=generator)
        scores = model(x)
        loss = functional.cross_entropy(scores, torch.arange(size) % CLASSES)
        if leaks and rank == 1:
            kept.append((scores.softmax(1) * scores.log_softmax(1)).sum())
        if step % 50 == 49:
            with torch.no_grad():
                evaluated[:] = [model(x) for _ in range(20)]
        return loss

    return loss_of


def main():
    name = sys.argv[1]
    steps = int(sys.argv[2])
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    loss_of, outputs, rate = {
        "one-class": (one_class, 1, 0.1),
        "learned": (learned, 2, 0.1),
        "in-one-order": (ordered(False, False), CLASSES, 0.01),
        "in-one-order-augmented": (ordered(False, True), CLASSES, 0.01),
        "shuffled-augmented": (ordered(True, True), CLASSES, 0.01),
        "one-batch": (one_batch(32), CLASSES, 0.01),
        "whole-data": (one_batch(150), CLASSES, 0.01),
        "late": (late, CLASSES, 0.01),
        "poisoned": (poisoned, CLASSES, 0.01),
        "jumping": (jumping, CLASSES, 0.01),
        "memory-leak": (memory(leaks=True), CLASSES, 0.01),
        "memory": (memory(leaks=False), CLASSES, 0.01),
    }[name]
    bare = nn.Linear(FEATURES, outputs)
    model = DistributedDataParallel(bare) if world > 1 else bare
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    agent.attach(model, optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
