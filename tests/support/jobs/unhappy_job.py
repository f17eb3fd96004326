"""A training that goes wrong in one of many ways: `unhappy_job.py HOW STEP`, one rank a process.

The rank that goes wrong is the last one; the others do as they should.
"""

import datetime
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from rankscope import agent

HOW, AT = sys.argv[1], int(sys.argv[2])
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WRONG = RANK == RANKS - 1
BATCH = 16


def stand_still():
    while True:
        time.sleep(60)


class Samples(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        if HOW == "loader" and WRONG and index >= AT * BATCH:
            stand_still()
        generator = torch.Generator().manual_seed(index * RANKS + RANK)
        x = torch.randn(8, generator=generator)
        return x, (x.sum() > 0).long()


def evaluate(model):
    model.eval()
    if HOW == "evaluation" and WRONG:
        stand_still()
    with torch.no_grad():
        model(torch.ones(4, 8))
    model.train()


def go_wrong():
    """What happens instead of a step."""
    how = HOW.removeprefix("all ")
    if how == "raises":
        raise ValueError("label 12 is out of range\nof 10 classes")
    if how == "exits":
        sys.exit(3)
    if how == "interrupted":
        raise KeyboardInterrupt
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "asked to end":
        os.kill(os.getpid(), signal.SIGTERM)
        stand_still()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if RANKS > 1:
        dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=30))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    if RANKS > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = agent.attach(model, optimizer)
    if HOW == "first step" and WRONG:
        stand_still()
    for step, (x, y) in enumerate(DataLoader(Samples(), BATCH)):
        if step == AT:
            evaluate(model.module if RANKS > 1 else model)
            if HOW == "done" and WRONG:
                monitor.close()
                stand_still()
            if WRONG or HOW.startswith("all "):
                go_wrong()
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(0.01)


if __name__ == "__main__":
    main()
