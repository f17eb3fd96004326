"""Three ranks that save a checkpoint each, or go on from it.

RANK=0 WORLD_SIZE=3 python reloaded_job.py save|load FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from rankscope import agent
from tests.support.jobs.resumed_job import made, train

EARLY, BEFORE, AFTER = 10, 20, 30


def main(what, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = torch.Generator().manual_seed(rank)
    model, optimizer = made()
    path = Path(folder) / f"rank_{rank}.pt"
    if what == "save":
        with agent.attach(model, optimizer) as monitor:
            train(model, optimizer, EARLY, data)
            torch.save(state(model, optimizer), path.with_suffix(".early"))
            train(model, optimizer, BEFORE - EARLY, data)
            torch.save(state(model, optimizer), path)
            saved = monitor.checkpoint(path, state(model, optimizer))
            assert (saved.saved.step, saved.tensors, saved.unchecked) == (BEFORE, 16, {})
    else:
        loaded = torch.load(path, weights_only=True)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        with agent.attach(model, optimizer) as monitor:
            found = monitor.checkpoint(path, state(model, optimizer), loaded=True)
            print(f"same={found.same} {found}: {', '.join(found.differing)}")
            train(model, optimizer, AFTER, data)
    dist.destroy_process_group()


def state(model: nn.Module, optimizer: torch.optim.Optimizer):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
