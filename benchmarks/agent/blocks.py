"""One rank: all workloads, block by block, and what rank 0 says of it in the end."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from rankscope import agent

from . import calls
from .arms import Agent, Arm, Background, Plain, TensorBoard
from .figures import Round, Steps, compared, paired, processor_share, slow_alone
from .workloads import PHASES, WORKLOADS, Trainer, Workload, fitted_batch


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long everything takes.

    Attributes:
        server: where the agent posts.
        folder: for files.
        scale: multiplies the seconds of each workload.
        reattached: rounds with attaching and closing at each block; for the MLPs.
        workloads: names; empty for all.
        calls: steps during which `log` calls are measured.
    """

    server: str
    folder: str
    scale: float = 1.0
    reattached: int = 0
    workloads: tuple[str, ...] = ()
    calls: int = 400


# After `_WARM_UP_SECONDS`, or 2,048 steps, a run is under way for the agent: its sampling is at its
# steady pace, a process of its own posts for it, and batches come as they will. Its clock leaves
# pauses out, and a slow start takes its time.
_WARM_UP_SECONDS, _WARM_UP_STEPS = 30.0, 80
# How long the rounds of one trainer take together, in a run that is long enough for more than two.
_TRAINER_SECONDS = 120.0
# How long the pairs of a round take together.
_ROUND_SECONDS = 0.24
# What was put into torch or taken out of it has been in the processor's hands: on steps so short
# that this shows, one passes unmeasured before each that is measured.
_SWITCHED_SECONDS = 0.004
# TensorBoard has a block of its own, beside a plain one, as it works beside the training for a
# while after each step; the first steps are not measured.
_BLOCK_SECONDS = 0.06
_FIRST_STEPS = 3
# TensorBoard's block stands in one round of this number: its ratio is far from 1.
_TENSORBOARD_ROUNDS = 4
# How long the agent trains alone, beside the time of the rounds, and the steps before.
_ALONE_SHARE = 0.5
_SETTLING_STEPS = 50
# Where the agent is attached at each block: longer than the time between two posts, and the part
# before it that is not measured.
_LONG_SECONDS, _SETTLE_SECONDS = 1.2, 0.6
# Less work of the agent's threads than this is no post, only a reading of the clock.
_HIT_SECONDS = 1e-5


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
    rounds: list[Round] = []
    others: list[Round] = []
    alone: list[Round] = []
    sampled: list[npt.NDArray[np.int64]] = []
    clock = _Clock()
    runs: list[str] = []
    order = random.Random(workload.name)  # the same on all ranks
    changed: list[str] = []
    background = elapsed = 0.0
    # Several trainers, as where tensors happen to lie in memory may suit one arm better.
    trainers = max(2, round(workload.seconds * plan.scale / _TRAINER_SECONDS))
    for number in range(trainers):
        # One for all arms: two that are alike to the bit differ by more than the agent costs.
        trainer = Trainer(workload, batch)
        typical = _typical(trainer, workload)
        pairs = max(2, round(_ROUND_SECONDS / typical / 2))
        steps = max(3, round(_BLOCK_SECONDS / typical))
        runs.append(_run_id(workload, f"twin-{number}"))
        watched = Agent(trainer, plan.server, runs[-1])
        changed = watched.changed
        settling = time.perf_counter() + _WARM_UP_SECONDS * min(2 * plan.scale, 1.0)
        while _still(settling):
            clock.block(watched, 0, _WARM_UP_STEPS)
        folder = Path(plan.folder) / f"{runs[-1]}-{dist.get_rank()}"
        writer = TensorBoard(trainer, folder, watched)
        plain_arm = Plain(trainer, watched)
        clock.background.find()
        worked, began = clock.background.seconds(), time.perf_counter()
        before = 1 if typical < _SWITCHED_SECONDS else 0
        while _still(began + workload.seconds * plan.scale / trainers):
            made = clock.pairs({"plain": plain_arm, "agent": watched}, pairs, before, order)
            rounds.append(made)
            if len(rounds) % _TENSORBOARD_ROUNDS == 0:
                beside: Round = {}
                arms: tuple[tuple[str, Arm], ...] = (("plain", plain_arm), ("tensorboard", writer))
                for name, arm in arms if order.random() < 0.5 else reversed(arms):
                    beside[name] = clock.block(arm, steps, _FIRST_STEPS)
                others.append(beside)
        background += clock.background.seconds() - worked
        elapsed += time.perf_counter() - began
        count = max(2, round(workload.seconds * _ALONE_SHARE * plan.scale / trainers / typical))
        samples = np.zeros(count, dtype=np.int64)
        alone.append({"agent": clock.block(watched, count, _SETTLING_STEPS, samples)})
        sampled.append(samples)
        watched.close()
        writer.close()
    rounds, others, alone = (_on_all_ranks(r) for r in (rounds, others, alone))
    again_runs, again = _reattached(plan, workload, trainer, typical)
    if dist.get_rank() != 0:
        return {}
    plain = np.concatenate([r["plain"].seconds for r in rounds])
    # Posts come by the clock: of a step it is what falls into its time.
    background *= float(plain.mean()) / elapsed
    figures: dict[str, Any] = {
        "workload": asdict(workload),
        "batch": batch,
        "tensors": trainer.tensors,
        "rounds": len(rounds),
        "changed": changed,
        "runs": runs + again_runs,
        "plain_ms": {
            "median": 1e3 * float(np.median(plain)),
            "p99": 1e3 * float(np.quantile(plain, 0.99)),
            "steps": len(plain),
        },
        "paired": paired(rounds, "agent"),
        "agent": compared(rounds, "agent"),
        "tensorboard": compared(others, "tensorboard"),
        "processor": processor_share(rounds, background, PHASES),
        "background_us_per_step": 1e6 * background if clock.background.known else None,
        "steps_hit_by_background": {
            name: float(np.concatenate([r[name].hit for r in rounds]).mean())
            for name in ("plain", "agent")
        },
        "alone": slow_alone([r["agent"] for r in alone], sampled)
        if clock.background.known
        else None,
    }
    if again:
        figures["reattached"] = compared(again, "agent")
    return figures


def _reattached(
    plan: Plan, workload: Workload, trainer: Trainer, step_seconds: float
) -> tuple[list[str], list[Round]]:
    """The same trainer with and without; nothing of the agent is alive in the plain blocks."""
    measured: list[Round] = []
    runs: list[str] = []
    order = random.Random(f"again {workload.name}")
    steps = round(_LONG_SECONDS / step_seconds) | 1
    settle = max(round(_SETTLE_SECONDS / step_seconds), _WARM_UP_STEPS)
    clock = _Clock()
    arm = Plain(trainer)
    for turn in range(plan.reattached if workload.kind == "mlp" else 0):
        blocks: dict[str, list[Steps]] = {"plain": [], "agent": []}
        sides = order.choice((("plain", "agent"), ("agent", "plain")))
        for place, name in enumerate((*sides, *reversed(sides))):
            monitor = None
            if name == "agent":
                runs.append(_run_id(workload, f"again-{turn}-{place}"))
                monitor = agent.attach(
                    trainer.model,
                    trainer.optimizer,
                    server=plan.server,
                    run=runs[-1],
                    allowance=0,
                )
            block = clock.block(arm, steps, settle)
            # All that happens belongs to the arm in which it happens.
            block.hit[:] = False
            blocks[name].append(block)
            if monitor is not None:
                monitor.close()
            dist.barrier()
        measured.append({name: _joined(parts) for name, parts in blocks.items()})
    return runs, measured


class _Clock:
    """Trains and measures the steps."""

    def __init__(self) -> None:
        self.background = Background()

    def pairs(self, arms: dict[str, Arm], count: int, before: int, order: random.Random) -> Round:
        """Trains `count` steps of each of two arms in pairs, in an order drawn for each pair.

        Neither does anything of its own beside the training.

        Args:
            before: steps without a measurement before each of them.
        """
        made = {
            name: Steps(
                np.empty(count),
                np.zeros(count, dtype=np.bool_),
                np.empty(count),
                np.empty((count, len(PHASES))),
                np.zeros(count, dtype=np.bool_),
            )
            for name in arms
        }
        turns = [*made.items()]
        clock, processor, background = time.perf_counter, time.process_time, self.background.seconds
        for i in range(count):
            for name, steps in turns if order.random() < 0.5 else reversed(turns):
                arm = arms[name]
                arm.begin()
                for _ in range(before):
                    arm.step()
                worked, used = background(), processor()
                began = clock()
                phases = arm.trainer.step_in_phases(time.thread_time_ns)
                steps.seconds[i] = clock() - began
                used, worked = processor() - used, background() - worked
                steps.hit[i] = worked > _HIT_SECONDS
                steps.processor[i] = used - worked
                steps.phases[i] = 1e-9 * np.diff(phases)
                if isinstance(arm, Agent):
                    steps.sampled[i] = arm.sampled()
        return made

    def block(
        self, arm: Arm, count: int, before: int, samples: npt.NDArray[np.int64] | None = None
    ) -> Steps:
        """Trains `before` steps without and `count` steps with a measurement.

        Args:
            samples: takes how many tiers the agent samples at each step, [count].
        """
        seconds = np.empty(count)
        works = np.empty(count)
        clock, step, background = time.perf_counter, arm.step, self.background.seconds
        arm.begin()
        for _ in range(before):
            step()
        worked = background()
        for i in range(count):
            if samples is not None and isinstance(arm, Agent):
                samples[i] = arm.tiers_due()
            began = clock()
            step()
            seconds[i] = clock() - began
            now = background()
            works[i], worked = now - worked, now
        return Steps(seconds, works > _HIT_SECONDS, worked=works)


def _joined(parts: list[Steps]) -> Steps:
    return Steps(
        np.concatenate([p.seconds for p in parts]),
        np.concatenate([p.hit for p in parts]),
    )


def _still(until: float) -> bool:
    """Whether rank 0 has time left."""
    left = torch.tensor([1 if time.perf_counter() < until else 0])
    dist.broadcast(left, src=0)
    return bool(left.item())


def _on_all_ranks(rounds: list[Round]) -> list[Round]:
    """The ranks wait for each other: a post of one delays all."""
    gathered: list[Any] = [None] * dist.get_world_size()
    mine = [{name: (steps.hit, steps.worked) for name, steps in r.items()} for r in rounds]
    dist.all_gather_object(gathered, mine)
    for number, made in enumerate(rounds):
        for name, steps in made.items():
            steps.hit = np.any([theirs[number][name][0] for theirs in gathered], axis=0)
            steps.worked = np.sum([theirs[number][name][1] for theirs in gathered], axis=0)
    return rounds


def _typical(trainer: Trainer, workload: Workload) -> float:
    """Seconds of a step, as rank 0 sees it."""
    times = []
    for _ in range(max(8, int(100 / workload.step_ms))):
        began = time.perf_counter()
        trainer.step()
        times.append(time.perf_counter() - began)
    shared: list[Any] = [float(np.median(times))]
    dist.broadcast_object_list(shared, src=0)
    return float(shared[0])


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
