"""A training of several ranks that saves checkpoints: `checkpoint_job.py FOLDER`.

Under DistributedDataParallel each rank saves its replica after steps 3 and 4 (`ddp/3/rank_0.pt`),
then resumes from step 4, the last rank from step 3 by mistake, and saves again (`ddp/resumed/`).
Under FSDP2 torch.distributed.checkpoint saves after the same steps (`fsdp/3`), and each rank the
parts that it holds (`parts/3/rank_0.pt`).
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tests.support.fully_sharded import fully_shard

FOLDER = Path(sys.argv[1])
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SAVED = (3, 4)


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 6))


def train(model, optimizer, save):
    generator = torch.Generator().manual_seed(RANK)
    for step in range(1, max(SAVED) + 1):
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()
        if step in SAVED:
            save(step)


def replicas():
    model = DistributedDataParallel(made())
    optimizer = torch.optim.AdamW(model.parameters())

    def save(name, step):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, file(f"ddp/{name}"))

    train(model, optimizer, lambda step: save(step, step))
    step = SAVED[0] if RANK == RANKS - 1 else SAVED[1]
    state = torch.load(file(f"ddp/{step}"), weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    save("resumed", state["step"])


def shards():
    model = made()
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.AdamW(model.parameters())

    def save(step):
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": step}
        dcp.save(state, checkpoint_id=FOLDER / "fsdp" / str(step))
        torch.save({"model": model.state_dict(), "step": step}, file(f"parts/{step}"))

    train(model, optimizer, save)


def file(name):
    path = FOLDER / name / f"rank_{RANK}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    replicas()
    shards()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
