"""What a call that logs 20 scalars costs: in the midst of training, and again and again."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .arms import Agent
from .figures import quantiles
from .workloads import Trainer

Log = Callable[[dict[str, float], int], None]
_HOT = 3000


def measure(arm: Agent[Trainer], steps: int, folder: Path) -> dict[str, Any]:
    """Microseconds of `monitor.log` of 20 scalars, beside what else is installed.

    Args:
        arm: the agent, in force.
        steps: steps trained; after each one of them a call is measured, so that the caches hold
            what training left there. They take turns; `monitor.log` has every other step.
        folder: for files.
    """
    monitor = arm.monitor
    writers: dict[str, Log] = {"monitor.log": lambda scalars, step: monitor.log(**scalars)}
    result: dict[str, Any] = {}
    endings: list[Callable[[], object]] = []
    for name, module, opened in (
        ("SummaryWriter", "torch.utils.tensorboard", _summary_writer),
        ("trackio", "trackio", _trackio),
        ("wandb offline", "wandb", _wandb),
    ):
        if importlib.util.find_spec(module) is None:
            result[name] = "not installed"
            continue
        writers[name], ending = opened(folder)
        endings.append(ending)
    others = [name for name in writers if name != "monitor.log"]
    cold: dict[str, list[float]] = {name: [] for name in writers}
    names = [f"metric_{i}" for i in range(20)]
    clock = time.perf_counter
    for step in range(steps):
        arm.step()
        name = others[step // 2 % len(others)] if step % 2 and others else "monitor.log"
        scalars = {metric: float(step + i) for i, metric in enumerate(names)}
        log = writers[name]
        began = clock()
        log(scalars, step)
        cold[name].append(clock() - began)
    hot: dict[str, list[float]] = {name: [] for name in writers}
    for name, log in writers.items():
        for step in range(_HOT if name == "monitor.log" else _HOT // 10):
            scalars = {metric: float(step + i) for i, metric in enumerate(names)}
            began = clock()
            log(scalars, steps + step)
            hot[name].append(clock() - began)
    for ending in endings:
        ending()
    # The first calls import, open files and use every name for the first time.
    for name in writers:
        result[name] = {
            "in_training": quantiles(cold[name][5:]) | {"calls": len(cold[name][5:])},
            "hot": quantiles(hot[name][5:]) | {"calls": len(hot[name][5:])},
        }
    return result


def _summary_writer(folder: Path) -> tuple[Log, Callable[[], object]]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"))

    def log(scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def _trackio(folder: Path) -> tuple[Log, Callable[[], object]]:
    os.environ["TRACKIO_DIR"] = str(folder / "trackio")
    import trackio

    with contextlib.redirect_stdout(io.StringIO()):
        trackio.init(project="bench", embed=False)
    return lambda scalars, step: trackio.log(scalars), lambda: _quiet(trackio.finish)


def _wandb(folder: Path) -> tuple[Log, Callable[[], object]]:
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    wandb.init(
        project="bench", mode="offline", dir=str(folder), settings=wandb.Settings(silent=True)
    )
    return lambda scalars, step: wandb.log(scalars), wandb.finish


def _quiet(call: Callable[[], object]) -> None:
    # Its farewell would stand in the middle of the figures.
    with contextlib.redirect_stdout(io.StringIO()):
        call()
