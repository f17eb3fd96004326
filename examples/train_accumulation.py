"""Accumulates the gradients of several micro-batches before each step of the optimizer.

    torchrun --nproc-per-node 2 examples/train_accumulation.py

`train_accumulation.py` is `train_accumulation_plain.py` and the lines that end in `# rankscope`.
"""

import argparse
import contextlib

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankscope import agent  # rankscope


def main() -> None:
    """Trains one rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--micro-batches", type=int, default=4, help="of each step")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16.0, dtype=torch.float32)
    labels = torch.tensor(digits)
    shuffled = torch.Generator().manual_seed(rank)
    images, labels = images[rank::world], labels[rank::world]

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    agent.attach(model, optimizer)  # rankscope
    criterion = nn.CrossEntropyLoss()

    for _ in range(options.steps):
        optimizer.zero_grad()
        for micro in range(options.micro_batches):
            batch = torch.randperm(len(images), generator=shuffled)[:32]
            last = micro == options.micro_batches - 1
            # Gradients are reduced in the last backward pass of a step alone.
            with contextlib.nullcontext() if last else model.no_sync():
                loss = criterion(model(images[batch]), labels[batch])
                (loss / options.micro_batches).backward()
        optimizer.step()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
