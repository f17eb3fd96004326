"""What a full sample costs, against reading the same bytes: `python -m benchmarks.sample`.

    python -m benchmarks.sample [--rounds N] [--tensors N ...] [--frozen TIMES] [--json FILE]
        [--profile TENSORS]

One process, one thread, stacks of linear layers of 16, 60 and 400 tensors. With the agent attached
and every step asked for in full (all sampling tiers, that of the optimizer's state too), a step is
timed in turns with the same step without the agent, in blocks, so that a machine that drifts drifts
for both. Times are processor time of the training thread: what other processes take is not counted;
what they do to caches and clock rates is, so the tenth percentile stands for each, not the median.

Beside it stands a plain read of what a sample reads: `sum` of five copies of the parameters (the
parameters before and after the step, the local and the reduced gradient, the optimizer's state),
each read again and again, so that it lies in the cache as far as it fits there. The aim is at most
8 times that read, 8 microseconds a tensor and 0.2 ms: a digest and a sketch are some ten operations
an element where a sum is one, and what is asked of torch for each tensor is a few calls of its
dispatcher at half a microsecond to two.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.agent import sink
from benchmarks.agent.arms import Agent, Plain
from rankscope import agent

# Layers and width: 16 tensors and 1.6 M parameters, 60 and 0.27 M, 400 and 1.8 M.
CASES = {16: (8, 448), 60: (30, 94), 400: (200, 94)}
_COPIES, _OF_READ, _A_TENSOR, _AT_ALL = 5, 8.0, 8e-6, 0.2e-3
_BLOCK, _WARM = 8, 12
_BATCH = 32


class Trainer:
    """A stack of linear layers, trained on the same batch again and again."""

    def __init__(self, layers: int, width: int, frozen: int = 0) -> None:
        torch.manual_seed(0)
        stack: list[nn.Module] = []
        for number in range(frozen + layers):
            linear = nn.Linear(width, width)
            stack += [linear.requires_grad_(number >= frozen), nn.Tanh()]
        self.model = nn.Sequential(*stack[:-1])
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=1e-4, momentum=0.9)
        self.criterion = nn.MSELoss()
        self.x, self.y = torch.randn(2, _BATCH, width)

    def step(self) -> torch.Tensor:
        """One training step; its loss."""
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.criterion(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        return loss


def seconds_of(call: Any, times: int) -> list[float]:
    """Processor time of each of some calls."""
    found = []
    for _ in range(times):
        began = time.thread_time()
        call()
        found.append(time.thread_time() - began)
    return found


def low(times: list[float]) -> float:
    """The tenth percentile."""
    return statistics.quantiles(times, n=10)[0]


def read(parameters: Sequence[torch.Tensor], rounds: int) -> float:
    """Seconds of a plain sum of five copies."""
    copy = torch.cat([p.detach().reshape(-1) for p in parameters])
    return _COPIES * low(seconds_of(copy.sum, 20 * rounds))


def measured(
    layers: int, width: int, *, server: str, rounds: int, frozen: int = 0
) -> dict[str, float]:
    """Seconds of a plain step, of a sample and of a read; the parameters and tensors there are.

    Args:
        frozen: layers before those that are trained, in which nothing is.
    """
    trainer = Trainer(layers, width, frozen)
    sampled = Agent(trainer, server, f"sample-{2 * layers}")
    plain = Plain(trainer, sampled)
    sampled.monitor._schedule.ask_dense(1 << 40)
    times: dict[str, list[float]] = {"plain": [], "sampled": []}
    for number in range(rounds + 2):
        for name, arm in (("plain", plain), ("sampled", sampled)):
            arm.begin()
            arm.step()  # the first one after the change finds cold caches
            taken = seconds_of(arm.step, _BLOCK)
            if number >= 2:
                times[name] += taken
    sampled.close()
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    middle = {name: low(taken) for name, taken in times.items()}
    found: dict[str, float] = {
        "tensors": len(parameters),
        "parameters": sum(p.numel() for p in parameters),
        "plain_step": middle["plain"],
        "sample": middle["sampled"] - middle["plain"],
        "read": read(parameters, rounds),
    }
    found["limit"] = _OF_READ * found["read"] + _A_TENSOR * len(parameters) + _AT_ALL
    return found


def profile(layers: int, width: int, server: str) -> None:
    """Prints where the time of sampled steps goes."""
    trainer = Trainer(layers, width)
    monitor = agent.attach(trainer.model, trainer.optimizer, server=server, run="profile")
    monitor._schedule.ask_dense(1 << 40)
    for _ in range(_WARM):
        trainer.step()
    profiler = cProfile.Profile(time.thread_time)
    steps = 100
    profiler.enable()
    for _ in range(steps):
        trainer.step()
    profiler.disable()
    monitor.close()
    print(f"{steps} steps")
    for order in ("tottime", "cumtime"):
        pstats.Stats(profiler).sort_stats(order).print_stats(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tensors", type=int, nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--frozen", type=int, default=0, help="layers that are frozen, times those that are trained"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=int, choices=list(CASES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    server = subprocess.Popen(
        [sys.executable, sink.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    address = server.stdout.readline().strip()
    cases = [CASES[tensors] for tensors in options.tensors]
    try:
        if options.profile:
            profile(*CASES[options.profile], address)
            return
        rows = [
            measured(*case, server=address, rounds=options.rounds, frozen=options.frozen * case[0])
            for case in cases
        ]
    finally:
        server.kill()
        server.wait()
    columns = ("plain_step", "sample", "read", "limit")
    print(f"{'tensors':>8}{'params':>10}" + "".join(f"{c + ' ms':>15}" for c in columns))
    for row in rows:
        figures = "".join(f"{1e3 * row[c]:15.3f}" for c in columns)
        kept = "" if row["sample"] <= row["limit"] else "   over"
        print(f"{row['tensors']:8}{row['parameters'] / 1e6:9.2f}M{figures}{kept}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
