"""The training script of the demo: one rank of a DDP job on scikit-learn's handwritten digits.

It is an ordinary trainer, started once for each rank with the environment that torchrun would set
(RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT). What Rankscope needs is the one line with
`agent.attach`; what the demo needs to break it are the lines with `fault`.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from rankscope import agent
from rankscope.server.demo.faults import FAULTS, decide
from rankscope.server.demo.injection import INJECTORS, Injector

BATCH_SIZE = 32  # on each rank
LEARNING_RATE = 0.002
EVALUATE_EVERY = 60
# The share of step time that the agent may take: more than its default, because the steps of so
# small a model are so short that 1 % of one would not pay for looking at every step.
OVERHEAD = 0.1
# A rank whose peer has died must fail soon and not after the default half hour.
COLLECTIVE_TIMEOUT = timedelta(seconds=20)


class DigitsNet(nn.Module):
    """Two convolutions and two linear layers: 14,074 parameters in 8 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.hidden = nn.Linear(32 * 2 * 2, 64)
        self.output = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits [N, 10] of images [N, 1, 8, 8]."""
        x = torch.max_pool2d(torch.relu(self.conv1(images)), 2)
        x = torch.max_pool2d(torch.relu(self.conv2(x)), 2)
        x = torch.relu(self.hidden(x.flatten(1)))
        logits: torch.Tensor = self.output(x)
        return logits


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and test set: 1,437 and 360 images of 8 x 8 pixels, standardised, mixed once."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)[order]
    pixels = (pixels - pixels.mean()) / pixels.std()
    targets = torch.tensor(labels)[order]
    return TensorDataset(pixels[:1437], targets[:1437]), TensorDataset(
        pixels[1437:], targets[1437:]
    )


def batches(
    data: TensorDataset, *, seed: int, generator: torch.Generator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of this rank's share of the data, epoch after epoch, slightly moved and noisy."""
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, seed=seed)
    loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler, drop_last=True)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for images, labels in loader:
            yield augmented(images, generator), labels
        epoch += 1


def augmented(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Every image moved by up to a pixel, with some noise on it."""
    n = len(images)
    padded = nn.functional.pad(images[:, 0], (1, 1, 1, 1))
    offsets = torch.randint(0, 3, (2, n, 1), generator=generator) + torch.arange(8)
    moved = padded[torch.arange(n)[:, None, None], offsets[0, :, :, None], offsets[1, :, None, :]]
    noise = 0.1 * torch.randn(moved.shape, generator=generator)
    return (moved + noise).unsqueeze(1)


def train(*, fault: Injector, rank: int, steps: int, seed: int) -> None:
    """Trains one rank from its first step to its last."""
    training_set, test_set = digits()
    torch.manual_seed(seed)
    model = DistributedDataParallel(DigitsNet())
    # What is drawn from here on (here: seeds for the workers of a loader) is each rank's own.
    torch.manual_seed(seed * 1000 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    criterion = nn.CrossEntropyLoss()
    fault.wrapped(model)

    own = torch.Generator().manual_seed(seed * 1000 + rank)
    source = batches(training_set, seed=seed, generator=own)
    with agent.attach(model, optimizer, overhead=OVERHEAD):
        for step in range(steps):
            fault.before_step(step, model, optimizer)
            images, labels = fault.batch(step, *next(source))
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()

            if step % EVALUATE_EVERY == EVALUATE_EVERY - 1:
                evaluate(model, criterion, test_set)


@torch.no_grad()
def evaluate(model: nn.Module, criterion: nn.Module, test_set: TensorDataset) -> None:
    """Passes this rank's part of the test set through the model; the agent sees loss and accuracy.

    Every rank takes the same number of images: ranks that differ in the number of forward passes
    would wait for each other in vain.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels = test_set.tensors
    share = len(images) // world_size
    mine = slice(rank * share, (rank + 1) * share)
    model.eval()
    criterion(model(images[mine]), labels[mine])
    model.train()


def main() -> int:
    """Reads the arguments that `launch` gives and trains; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    injection = decide(
        FAULTS[arguments.fault], ranks=world_size, steps=arguments.steps, seed=arguments.seed
    )
    fault = INJECTORS[arguments.fault](injection, rank=rank, seed=arguments.seed)
    try:
        train(fault=fault, rank=rank, steps=arguments.steps, seed=arguments.seed)
    except RuntimeError:  # a collective failed: a peer is gone. The monitor has reported it.
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A gloo thread may still want the interpreter's lock while the interpreter shuts down, which
    # aborts the process; everything has been sent and printed, so it ends here.
    os._exit(code)
