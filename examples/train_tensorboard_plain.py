"""Logs to TensorBoard on rank 0; Rankscope writes events of every rank beside them.

    torchrun --nproc-per-node 2 examples/train_tensorboard.py

`train_tensorboard.py` is `train_tensorboard_plain.py` and the lines that end in `# rankscope`.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter


def main() -> None:
    """Trains one rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--logs", default="runs", help="folder of the event files")
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
    writer = SummaryWriter(f"{options.logs}/trainer") if rank == 0 else None
    criterion = nn.CrossEntropyLoss()

    for step in range(options.steps):
        batch = torch.randperm(len(images), generator=shuffled)[:32]
        optimizer.zero_grad()
        loss = criterion(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        if writer is not None:
            writer.add_scalar("loss", loss.item(), step)
    if writer is not None:
        writer.close()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
