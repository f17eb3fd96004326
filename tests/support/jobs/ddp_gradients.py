"""Two processes under DistributedDataParallel and what the gradient probes say of them."""

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from rankscope.agent.probes.gradients.applied import Gradients
from rankscope.agent.probes.gradients.cosine import GradientCosine
from rankscope.agent.probes.gradients.local import LocalGradients
from tests.support.jobs.ending import end_at_once
from tests.support.probe_harness import Harness

PROBES = (LocalGradients, Gradients, GradientCosine)
WAYS = ("plain", "accumulated", "no_sync", "bucket_view", "scaled", "half")
SCALE = 1024.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.large = nn.Linear(300, 256)
        self.small = nn.Linear(256, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.small(torch.tanh(self.large(x)))


def loss_of(model, rank, seed):
    generator = torch.Generator().manual_seed(10 * seed + rank)
    x = torch.randn(8, 300, generator=generator)
    y = torch.randint(0, 3, (8,), generator=generator)
    return functional.cross_entropy(model(x), y)


def step_of(way, model, optimizer, rank, step):
    optimizer.zero_grad()
    if way in ("accumulated", "no_sync"):
        if way == "no_sync":
            with model.no_sync():
                loss_of(model, rank, 7 * step).backward()
        else:
            loss_of(model, rank, 7 * step).backward()
        loss_of(model, rank, 7 * step + 1).backward()
        optimizer.step()
    elif way == "scaled":
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        scaler.scale(loss_of(model, rank, step)).backward()
        scaler.step(optimizer)
    elif way == "half":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, rank, step)
        loss.backward()
        optimizer.step()
    else:
        loss_of(model, rank, step).backward()
        optimizer.step()


def worker(rank, folder):
    """Trains in every way; leaves (fingerprints, scalars, sketches before) in a file."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    reported = {}
    for way in WAYS:
        model = DistributedDataParallel(
            Net(), find_unused_parameters=True, gradient_as_bucket_view=way == "bucket_view"
        )
        harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.01), probes=PROBES)
        for step in range(2):
            step_of(way, model, harness.optimizer, rank, step)
        facts = harness.steps[-1]
        harness.close()
        reported[way] = (
            {p.stage: (p.digests, p.sketches) for p in facts.fingerprints},
            {name: float(value) for name, value in facts.scalars.items()},
            {p.stage: p.sketches for p in harness.steps[0].fingerprints},
        )
    torch.save(reported, f"{folder}/{rank}")
    torch.distributed.destroy_process_group()
    end_at_once()
