"""Ranks of which one alone hears of alerts: all do the same at the same step.

RANK=0 WORLD_SIZE=3 python acting_job.py FOLDER
"""

import json
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from rankscope import agent

STEPS = 100_000


def largest(number):
    asked = torch.tensor(number)
    dist.all_reduce(asked, op=dist.ReduceOp.MAX)
    return int(asked)


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # The last rank is not watched at all, and agrees with the others.
    mode = "disabled" if rank == dist.get_world_size() - 1 else "offline"
    done = []
    with agent.attach(model, optimizer, mode=mode) as monitor:
        actions = monitor.actions(largest)
        if rank == 1:
            # As a monitor's thread calls them, at no step in particular.
            for seconds, action in ((0.3, actions.save), (0.6, actions.skip), (0.9, actions.stop)):
                threading.Timer(seconds, action, [{"kind": "loss.spike"}]).start()
        for step in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            due = actions.due()
            if due:
                done.append((step, due))
            if due == "skip":
                continue
            optimizer.step()
            if due == "stop":
                break
    (Path(folder) / f"done_{rank}.json").write_text(json.dumps(done))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
