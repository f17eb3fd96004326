"""Trains a small network on handwritten digits with FSDP2 (`fully_shard`).

    torchrun --nproc-per-node 2 examples/train_fsdp2.py

`train_fsdp2.py` is `train_fsdp2_plain.py` and the lines that end in `# rankscope`.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rankscope import agent  # rankscope


def main() -> None:
    """Trains one rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
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
    mesh = init_device_mesh("cpu", (world,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    agent.attach(model, optimizer)  # rankscope
    criterion = nn.CrossEntropyLoss()

    for _ in range(options.steps):
        batch = torch.randperm(len(images), generator=shuffled)[:32]
        optimizer.zero_grad()
        loss = criterion(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
