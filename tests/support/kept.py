"""What trainers keep of a training: in files, in copies, for other processes. Knows no Rankscope.

As a program, `python kept.py [--without]`, it takes a folder of such files in each line of input
and prints, as JSON in a line, what became of them by name; `--without` Rankscope being there.
"""

from __future__ import annotations

import importlib
import io
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, SequentialLR, StepLR

FEATURES, CLASSES = 6, 3


def noted(module: nn.Module, args: Any, output: Any) -> None:
    """A hook of the user's own."""
    module.calls = getattr(module, "calls", 0) + 1


class Net(nn.Module):
    """All that probes put hooks on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(FEATURES, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU())
        self.outer = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x)))


class OwnState(Net):
    """Says itself what is pickled of it, as far as that goes."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "version": 2}


class Warmup(LRScheduler):
    """A schedule with a `step` of its own."""

    def step(self, epoch: int | None = None) -> None:
        super().step()

    def get_lr(self) -> list[float]:
        return [rate * min(1.0, (self.last_epoch + 1) / 4) for rate in self.base_lrs]


def schedule_of(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return SequentialLR(optimizer, [Warmup(optimizer), StepLR(optimizer, 2)], milestones=[2])


def saved(thing: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def _named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _read(path: Path, *, weights_only: bool) -> str:
    try:
        if path.suffix == ".pickle":
            thing = pickle.loads(path.read_bytes())
        elif path.suffix == ".script":
            thing = torch.jit.load(path)
        elif weights_only:
            # As users do it: all of the classes that they know to be theirs or torch's.
            names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            with torch.serialization.safe_globals([_named(name) for name in names]):
                thing = torch.load(path, weights_only=True)
        else:
            thing = torch.load(path, weights_only=False)
        if callable(thing):
            thing(torch.ones(4, FEATURES)).sum().backward()
        return type(thing).__name__
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"


def _read_all(folder: Path) -> dict[str, list[str]]:
    return {
        str(path.relative_to(folder)): [
            _read(path, weights_only=only)
            for only in ((True, False) if path.suffix == ".pt" else (False,))
        ]
        for path in sorted(p for p in folder.rglob("*") if p.is_file())
    }


def main() -> None:
    if "--without" in sys.argv:
        sys.modules["rankscope"] = None  # type: ignore[assignment]
    else:
        importlib.import_module("rankscope.agent.attach")
    sys.path.insert(0, str(Path(__file__).parents[2]))  # the classes are of `tests.support`
    # What was wrapped in DistributedDataParallel wants a process group.
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    for line in sys.stdin:
        print(json.dumps(_read_all(Path(line.removesuffix("\n")))), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
