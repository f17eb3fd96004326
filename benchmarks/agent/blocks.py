"""One rank: all workloads, block by block, and what rank 0 says of it in the end."""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rankscope import agent

from . import calls
from .arms import Agent, Arm, Plain, TensorBoard, background_seconds
from .figures import compared, relative
from .workloads import WORKLOADS, Trainer, Workload, fitted_batch


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long everything takes; seconds.

    Attributes:
        server: where the agent posts.
        block: measured part of a block.
        settle: part before it that is trained but not measured, for every arm alike: longer than
            the half second between two posts, so that what the agent has still to send when its
            block ends does not fall into the block of another arm, and its own share does fall
            into its own.
        rounds: multiplies the rounds of each workload.
        reattached: rounds with attaching and closing at each block; for the MLPs.
        workloads: names; empty for all.
        calls: steps during which `log` calls are measured.
        folder: for files.
    """

    server: str
    folder: str
    block: float = 1.2
    settle: float = 0.6
    rounds: float = 1.0
    reattached: int = 3
    workloads: tuple[str, ...] = ()
    calls: int = 400


# The dense start of the agent is over after 8 steps, and its sampling is thinned by its own
# measurements some dozens later.
_WARM_UP_STEPS = 80


def run(plan: Plan) -> None:
    """Everything that one rank does; rank 0 prints the figures as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: dict[str, Any] = {"workloads": {}}
    chosen = [w for w in WORKLOADS if not plan.workloads or w.name in plan.workloads]
    for workload in chosen:
        began = time.perf_counter()
        figures = _measured(plan, workload)
        if dist.get_rank() == 0:
            results["workloads"][workload.name] = figures
            sys.stderr.write(f"{workload.name}: {time.perf_counter() - began:.0f} s\n")
    if plan.calls:
        results["calls"] = _calls(plan)
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(results) + "\n")
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that is shutting down


def _measured(plan: Plan, workload: Workload) -> dict[str, Any]:
    batch = fitted_batch(workload)
    # Three trainers, alike to the bit; which arm has which is changed half-way, because where
    # tensors happen to lie in memory can make a step slower by more than the agent does.
    trainers = [Trainer(workload, batch) for _ in range(3)]
    step_seconds = _typical(trainers, workload)
    steps = _Steps(plan, step_seconds)
    rounds = max(2, round(workload.rounds * plan.rounds))
    measured: list[dict[str, list[Any]]] = []
    background = _Background()
    runs: list[str] = []
    order = random.Random(workload.name)  # the same on all ranks
    process_wide: list[str] = []
    for half in range(2):
        slots = trainers[half:] + trainers[:half]
        runs.append(_run_id(workload, f"twin-{half}"))
        writer = TensorBoard(slots[2], Path(plan.folder) / f"{runs[-1]}-{dist.get_rank()}")
        watched = Agent(slots[1], plan.server, runs[-1])
        process_wide = watched.process_wide
        arms: dict[str, Arm] = {"plain": Plain(slots[0]), "agent": watched, "tensorboard": writer}
        for arm in arms.values():
            _train(arm, steps.warm_up)
        for _ in range(rounds // 2 if half else rounds - rounds // 2):
            sides = order.choice((("plain", "agent"), ("agent", "plain")))
            blocks: dict[str, list[Any]] = {}
            for name in (*sides, "tensorboard", *reversed(sides)):
                blocks.setdefault(name, []).append(
                    _block(arms[name], steps, background if name == "agent" else None)
                )
            measured.append(blocks)
        watched.close()
        writer.close()
    figures: dict[str, Any] = {
        "workload": asdict(workload),
        "batch": batch,
        "tensors": trainers[0].tensors,
        "process_wide": process_wide,
        "runs": runs,
    }
    reattached = _reattached(plan, workload, trainers[0], steps, runs)
    if dist.get_rank() == 0:
        ratios = relative(measured)
        plain = np.concatenate([t for blocks in measured for t in blocks["plain"]])
        figures["plain_ms"] = {
            "median": 1e3 * float(np.median(plain)),
            "p99": 1e3 * float(np.quantile(plain, 0.99)),
            "steps": len(plain),
        }
        for arm in ("agent", "tensorboard"):
            figures[arm] = compared(ratios["plain"], ratios[arm])
        if reattached:
            ratios = relative(reattached)
            figures["reattached"] = compared(ratios["plain"], ratios["agent"])
        figures["background_us_per_step"] = background.per_step()
    return figures


def _reattached(
    plan: Plan, workload: Workload, trainer: Trainer, steps: _Steps, runs: list[str]
) -> list[dict[str, list[Any]]]:
    """The same trainer with and without; nothing of the agent is alive in the plain blocks."""
    measured = []
    order = random.Random(f"again {workload.name}")
    for turn in range(plan.reattached if workload.kind == "mlp" else 0):
        blocks: dict[str, list[Any]] = {"plain": [], "agent": []}
        sides = order.choice((("plain", "agent"), ("agent", "plain")))
        for place, name in enumerate((*sides, *reversed(sides))):
            monitor = None
            if name == "agent":
                runs.append(_run_id(workload, f"again-{turn}-{place}"))
                monitor = agent.attach(
                    trainer.model, trainer.optimizer, server=plan.server, run=runs[-1]
                )
            arm = Plain(trainer)
            _train(arm, steps.warm_up)
            blocks[name].append(_block(arm, steps, None))
            if monitor is not None:
                monitor.close()
            dist.barrier()
        measured.append(blocks)
    return measured


class _Steps:
    """Numbers of steps, the same on all ranks; odd, so that no block falls into the rhythm of a
    sampling at powers of two."""

    def __init__(self, plan: Plan, step_seconds: float) -> None:
        self.measured = max(5, round(plan.block / step_seconds)) | 1
        self.settle = max(2, round(plan.settle / step_seconds)) | 1
        self.warm_up = max(_WARM_UP_STEPS, self.settle)


class _Background:
    """Processor time of the agent's threads while its blocks are measured."""

    def __init__(self) -> None:
        self._seconds: float | None = 0.0
        self._steps = 0

    def add(self, before: float | None, steps: int) -> None:
        after = background_seconds()
        if before is None or after is None or self._seconds is None:
            self._seconds = None
        else:
            self._seconds += after - before
        self._steps += steps

    def per_step(self) -> float | None:
        if self._seconds is None or not self._steps:
            return None
        return 1e6 * self._seconds / self._steps


def _train(arm: Arm, count: int) -> None:
    arm.begin()
    for _ in range(count):
        arm.step()
    arm.end()


def _block(arm: Arm, steps: _Steps, background: _Background | None) -> Any:
    """Step times in seconds, float64 [n]."""
    times = np.empty(steps.measured)
    clock, step = time.perf_counter, arm.step
    gc.collect()
    dist.barrier()
    arm.begin()
    for _ in range(steps.settle):
        step()
    before = background_seconds() if background is not None else None
    began = clock()
    for i in range(steps.measured):
        step()
        now = clock()
        times[i] = now - began
        began = now
    if background is not None:
        background.add(before, steps.measured)
    arm.end()
    return times


def _typical(trainers: list[Trainer], workload: Workload) -> float:
    """Seconds of a step, as rank 0 sees it."""
    times = []
    for trainer in trainers:
        for _ in range(max(8, int(100 / workload.step_ms))):
            began = time.perf_counter()
            trainer.step()
            times.append(time.perf_counter() - began)
    told: list[Any] = [float(np.median(times))]
    dist.broadcast_object_list(told, src=0)
    return float(told[0])


def _run_id(workload: Workload, what: str) -> str:
    kind = "".join(c if c.isalnum() else "-" for c in workload.name)
    return f"bench-{os.environ['MASTER_PORT']}-{kind}-{what}"


def _calls(plan: Plan) -> dict[str, Any]:
    """`log` calls in the midst of the training of both ranks; measured by rank 0."""
    workload = next(w for w in WORKLOADS if w.name == "MLP, 10 ms")
    trainer = Trainer(workload, fitted_batch(workload))
    arm = Agent(trainer, plan.server, _run_id(workload, "calls"))
    arm.begin()
    rank = dist.get_rank()
    measured = calls.measure(arm, plan.calls, Path(plan.folder) / f"calls-{rank}")
    arm.close()
    return measured
