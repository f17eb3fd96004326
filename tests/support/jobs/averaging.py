"""Local SGD as a script: each rank trains for itself, at an interval of steps the weights are
averaged.

Arguments: the interval, the number of steps, the step after which rank 1 keeps its own weights (-1
for none), and of how many dimensions a tensor is at the least that is averaged.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

from rankscope import agent


def main(every, steps, missed, least):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    teacher = torch.randn(32, 4, generator=torch.Generator().manual_seed(7))
    own = torch.Generator().manual_seed(100 + rank)
    with agent.attach(model, optimizer):
        for step in range(steps):
            inputs = torch.randn(64, 32, generator=own)
            optimizer.zero_grad()
            criterion(model(inputs), (inputs @ teacher).argmax(1)).backward()
            optimizer.step()
            if step % every == every - 1:
                average(model, world, least, keep=rank == 1 and step == missed)
    dist.destroy_process_group()


@torch.no_grad()
def average(model, world, least, *, keep):
    for parameter in model.parameters():
        if parameter.ndim < least:
            continue
        mean = parameter.detach().clone()
        dist.all_reduce(mean)
        if not keep:
            parameter.copy_(mean / world)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
