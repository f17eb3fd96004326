"""A training of several ranks on devices that are simulated: `device_job.py FAULT AT`.

Everything is real but the events: their times are those of the host and of what is added to them,
and they pass late. The last rank is the suspect one.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankscope import agent
from rankscope.agent.process import device_events
from tests.support.device_events import FakeEvents

FAULT, AT = sys.argv[1], int(sys.argv[2])
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SECONDS, SLOW = 0.02, 0.06


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    ahead = [0.0]
    events = FakeEvents(lambda: time.perf_counter() + ahead[0], behind=2)
    device_events.events = lambda: events
    model = DistributedDataParallel(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with agent.attach(model, optimizer):
        for step in range(AT + 60):
            wrong = step >= AT and RANK == RANKS - 1
            time.sleep(SLOW if wrong and FAULT == "fetches" else SECONDS / 10)
            optimizer.zero_grad()
            output = model(torch.randn(4, 8))
            time.sleep(SLOW if wrong and FAULT == "computes" else SECONDS)
            output.square().mean().backward()
            if step >= AT and FAULT == "reduces":
                ahead[0] += SLOW  # of every rank's device, after its last gradient
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
