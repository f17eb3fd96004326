"""Small jobs on gloo that log metrics of their own, with a fault that no other kind names, or none.

RANK=0 WORLD_SIZE=4 python logging_jobs.py shifted
"""

from __future__ import annotations

import os
import sys
from collections import deque

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from rankscope import agent

FEATURES, CLASSES, STEPS = 16, 4, 400
AT, EVERY, SUSPECT = 208, 7, 1


class Job:
    """One rank of a training: what it learns from, and what it logs."""

    def __init__(self, name: str, rank: int) -> None:
        self.name, self.rank = name, rank
        self.random = torch.Generator().manual_seed(rank)
        self.teacher = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(99))
        self.episodes: deque[float] = deque(maxlen=100)

    def at_fault(self, step: int) -> bool:
        return self.rank == SUSPECT and step >= AT

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(64, FEATURES, generator=self.random)
        noise = torch.randn(64, CLASSES, generator=self.random)
        return x, (x @ self.teacher + noise).argmax(1)

    def metrics(self, step: int, logits: torch.Tensor) -> dict[str, float]:
        """What is logged at a step."""
        top = logits.detach().topk(2, dim=1).values
        margin = float((top[:, 0] - top[:, 1]).mean())
        entropy = float(torch.distributions.Categorical(logits=logits.detach()).entropy().mean())
        if self.name == "shifted" and self.at_fault(step):
            margin += 1.0
        if self.name == "spikes" and self.at_fault(step) and (step - AT) % EVERY == 0:
            entropy += 5.0
        logged = {"train/margin": margin, "train/entropy": entropy, "epoch": float(step // 40)}
        if self.name == "rewards":
            heavy = float(
                torch.randn(1, generator=self.random)
                / torch.rand(1, generator=self.random).clamp(0.05)
            )
            self.episodes.append(heavy + step / 50)
            logged["rollout/return"] = self.episodes[-1]
            logged["rollout/mean_return"] = sum(self.episodes) / len(self.episodes)
            logged["rollout/solved"] = float(self.episodes[-1] > 6)
        if self.name == "silent" and self.at_fault(step):
            del logged["train/entropy"]
        return logged


def main() -> None:
    name = sys.argv[1]
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    job = Job(name, rank)
    bare = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    if name == "gan":
        play(job, rank)
        return
    model = DistributedDataParallel(bare)
    here = {"step": 0}
    if name == "gradient":
        for parameter in bare.parameters():
            parameter.register_hook(lambda g: 1.5 * g if job.at_fault(here["step"]) else g)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = agent.attach(model, optimizer)
    for step in range(STEPS):
        here["step"] = step
        x, y = job.batch(step)
        optimizer.zero_grad()
        logits = model(x)
        functional.cross_entropy(logits, y).backward()
        monitor.log(**job.metrics(step, logits))
        optimizer.step()
    monitor.close()
    dist.destroy_process_group()


def play(job: Job, rank: int) -> None:
    """A generator against a discriminator, which is the model that is watched."""
    maker = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, FEATURES))
    critic = nn.Sequential(nn.Linear(FEATURES, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    both = [DistributedDataParallel(model) for model in (maker, critic)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=2e-3) for model in both]
    monitor = agent.attach(both[1], optimizers[1], config={"profile": "adversarial"})
    score = functional.binary_cross_entropy_with_logits
    for step in range(STEPS):
        real = job.batch(step)[0] @ torch.eye(FEATURES) + 2.0
        made = both[0](torch.randn(64, 4, generator=job.random))
        optimizers[1].zero_grad()
        right, wrong = both[1](real), both[1](made.detach())
        loss = score(right, torch.ones_like(right)) + score(wrong, torch.zeros_like(wrong))
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        fooled = critic(both[0](torch.randn(64, 4, generator=job.random)))
        other = score(fooled, torch.ones_like(fooled))
        other.backward()
        optimizers[0].step()
        monitor.log(loss_g=float(other), loss_d=float(loss), real=float(right.mean()))
    monitor.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
