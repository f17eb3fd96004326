"""Jobs of three ranks whose fault no comparison of trained replicas shows, or that are healthy.

RANK=0 WORLD_SIZE=3 python unseen_jobs.py frozen-bit 140
"""

from __future__ import annotations

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from rankscope import agent
from tests.support.fully_sharded import fully_shard

AT = 61
SUSPECT = 1
# Steps whose gradient is not finite on the suspect, where it is so again and again.
EVERY = 9
FEATURES, HIDDEN, CLASSES = 16, 32, 10


class Net(nn.Module):
    """A base, a head, and where there is one a teacher of the head."""

    def __init__(self, *, teacher: bool) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN))
        self.head = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))
        self.teacher = copy.deepcopy(self.head).requires_grad_(False) if teacher else None

    def forward(self, x):
        hidden = self.base(x)
        taught = None if self.teacher is None else self.teacher(hidden).detach()
        return self.head(hidden), taught

    @torch.no_grad()
    def follow(self, share):
        """The teacher takes over a share of the head."""
        for theirs, own in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
            theirs.lerp_(own, share)


class Job:
    """A training; `fault` is called before each step and may do anything to it."""

    def __init__(self, *, frozen=False, teacher=False, sharded=False, scaled=False):
        self.rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        self.net = Net(teacher=teacher)
        self.net.base.requires_grad_(not frozen)
        if sharded:
            mesh = init_device_mesh("cpu", (world,))
            for layer in (*self.net.base, *self.net.head):
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            self.model = fully_shard(self.net, mesh=mesh)
        else:
            self.model = DistributedDataParallel(self.net)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
        self.optimizer = self.built()
        self.saved = None
        self.step = 0

    def built(self):
        """An optimizer of all that is trained."""
        trained = [p for p in self.net.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-3)

    def train(self, steps, fault, *, guarded=False):
        """Trains; `guarded`: a step whose gradient is not finite is left out."""
        agent.attach(self.model, self.optimizer)
        for self.step in range(steps):
            fault(self)
            data = torch.Generator().manual_seed(1000 * self.rank + self.step)
            x = torch.randn(32, FEATURES, generator=data)
            y = torch.randint(0, CLASSES, (32,), generator=data)
            self.optimizer.zero_grad()
            given, taught = self.model(x)
            loss = functional.cross_entropy(given, y)
            if taught is not None:
                loss = loss + functional.mse_loss(given, taught)
            if self.scaler is not None:
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                continue
            loss.backward()
            if not guarded or torch.isfinite(nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)):
                self.optimizer.step()
        dist.destroy_process_group()

    def poison(self, when):
        """Puts a NaN into the suspect's own gradient of the head's first layer."""

        def hook(gradient):
            if self.rank == SUSPECT and when(self.step):
                gradient = gradient.clone()
                gradient.view(-1)[3] = float("nan")
            return gradient

        self.net.head[0].weight.register_hook(hook)


def flip(tensor):
    """One bit of one element, past everything that torch counts."""
    tensor.detach().numpy().reshape(-1).view("int32")[5] ^= 1 << 22


def once(act, *, everywhere=False):
    """Something that happens once, on the suspect or on all ranks."""

    def fault(job):
        if job.step == AT and (everywhere or job.rank == SUSPECT):
            act(job)

    return fault


def older_state(job):
    """Saves a state at step 30, and loads it later."""
    if job.step == 30:
        job.saved = copy.deepcopy(job.optimizer.state_dict())


def load_older(job):
    job.optimizer.load_state_dict(job.saved)


def build_anew(job):
    job.optimizer = job.built()


def both(*acts):
    def fault(job):
        for act in acts:
            act(job)

    return fault


def write_frozen(job):
    with torch.no_grad():
        job.net.base[2].weight.mul_(1.01)


def follow(share, every):
    def fault(job):
        if job.step and job.step % every == 0:
            job.net.follow(share)

    return fault


def recurring(step):
    return step > 50 and step % EVERY == 0


JOBS = {
    "frozen-bit": (
        {"frozen": True},
        once(lambda job: flip(job.net.base[2].weight)),
    ),
    "frozen-everywhere": ({"frozen": True}, once(write_frozen, everywhere=True)),
    "teacher-bit": (
        {"teacher": True},
        both(follow(0.01, 1), once(lambda job: flip(job.net.teacher[0].weight))),
    ),
    "teacher": ({"teacher": True}, follow(0.01, 1)),
    "target": ({"teacher": True}, follow(1.0, 20)),
    "shard-bit": (
        {"sharded": True},
        once(lambda job: flip(job.net.head[0].weight.to_local())),
    ),
    "frozen-shard-bit": (
        {"sharded": True, "frozen": True},
        once(lambda job: flip(job.net.base[2].weight.to_local())),
    ),
    "shards-everywhere": (
        {"sharded": True},
        once(lambda job: flip(job.net.head[0].weight.to_local()), everywhere=True),
    ),
    "older-state": ({}, both(older_state, once(load_older))),
    "older-state-everywhere": ({}, both(older_state, once(load_older, everywhere=True))),
    "new-optimizer-everywhere": ({}, once(build_anew, everywhere=True)),
    "scaled-nan": ({"scaled": True}, recurring),
    "guarded-nan": ({}, recurring),
    "guarded-nan-once": ({}, lambda step: step == AT),
}


def main():
    name, steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    options, fault = JOBS[name]
    job = Job(**options)
    if "nan" not in name:
        job.train(steps, fault)
        return
    job.poison(fault)
    job.train(steps, lambda job: None, guarded=name.startswith("guarded"))


if __name__ == "__main__":
    main()
