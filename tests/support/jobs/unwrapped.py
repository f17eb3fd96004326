"""Ranks that form a process group and train without a wrapper, as scripts that wrap on GPUs do.

Arguments: the number of steps, the seed of the model (-1: each rank has its own), and after how
many steps the ranks average their parameters (0 for never), with which torch does not count that
they are written. Batch norm and a falling rate: the ranks stay near each other.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

from rankscope import agent


def main(steps, seed, every):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed if seed >= 0 else 17 + rank)
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    criterion = nn.CrossEntropyLoss()
    teacher = torch.randn(32, 4, generator=torch.Generator().manual_seed(7))
    own = torch.Generator().manual_seed(100 + rank)
    with agent.attach(model, optimizer):
        for step in range(steps):
            inputs = torch.randn(16, 32, generator=own)
            optimizer.zero_grad()
            criterion(model(inputs), (inputs @ teacher).argmax(1)).backward()
            optimizer.step()
            scheduler.step()
            if every and step % every == every - 1:
                for parameter in model.parameters():
                    # `data` has a counter of its own.
                    dist.all_reduce(parameter.data)
                    parameter.data /= world
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
