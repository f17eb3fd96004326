"""Trainings that give the same bits whenever they have the same seed; torchrun starts them.

    torchrun --nproc-per-node 2 seeded_job.py first second third:nudge=17

trains three runs of these names one after the other; `nudge=STEP` adds a little to one tensor of
the last rank within the optimizer step STEP: with the gradients reduced and before the update.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankscope import agent

FEATURES, CLASSES, ROWS, STEPS = 8, 4, 16, 40
NUDGED = "2.bias"


def train(run: str, *, seed: int = 0, nudge: int | None = None, lr: float = 0.1) -> None:
    """One run, on this rank."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    torch.manual_seed(seed)
    task = torch.randn(FEATURES, CLASSES)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    draws = torch.Generator().manual_seed(1000 * seed + rank)
    monitor = agent.attach(wrapped, optimizer, run=run)
    for step in range(STEPS):
        x = torch.randn(ROWS, FEATURES, generator=draws)
        loss = nn.functional.cross_entropy(wrapped(x), (x @ task).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        if step == nudge and rank == last:
            with torch.no_grad():
                dict(model.named_parameters())[NUDGED][0] += 1e-3
        optimizer.step()
    monitor.close()


def main() -> None:
    """Trains the runs that are named, on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for named in sys.argv[1:]:
        run, *settings = named.split(":")
        values = dict(setting.split("=") for setting in settings)
        train(
            run,
            seed=int(values.get("seed", 0)),
            nudge=int(values["nudge"]) if "nudge" in values else None,
            lr=float(values.get("lr", 0.1)),
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
