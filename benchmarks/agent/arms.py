"""Switching the agent on and off within one process, and what is measured beside it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import FunctionType
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.nn.modules import loss as losses
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from rankscope import agent
from rankscope.agent.delivery import uploader_process
from rankscope.agent.steps.mode import COUNTED

from .workloads import Trainer

_MISSING = object()


class Changes:
    """What an attached agent has changed, so that it can be taken out for a while.

    Hooks of all optimizers and of the model, and functions of torch that have other code: left in
    place they would slow the plain arm as well, and the ratio would be too good. Found by comparing
    torch and the model before and after, so that nothing of the agent needs to be known here.

    Attributes:
        active: whether the changes are in force.
    """

    _OWNERS = (
        torch.Tensor,
        torch.nn.functional,
        torch.nn.utils,
        torch.nn.utils.clip_grad,
        torch.nn.Module,
        torch.optim.Optimizer,
        torch.autograd,
        torch.amp.GradScaler,
        torch.distributed,
        torch.utils.data.DataLoader,
        *{c for c in vars(losses).values() if isinstance(c, type) and c is not torch.nn.Module},
    )

    def __init__(self, model: torch.nn.Module) -> None:
        self._before = {owner: dict(vars(owner)) for owner in self._OWNERS}
        # A function may also keep its place and be given other code.
        self._code_before = {
            f: f.__code__
            for before in self._before.values()
            for f in before.values()
            if type(f) is FunctionType
        }
        self._codes: list[tuple[FunctionType, Any, Any]] = []
        self._changes: list[tuple[Any, str, Any, Any]] = []
        self._dicts = [
            (name, table)
            for home in (modules, optimizers)
            for name, table in vars(home).items()
            if name.startswith("_global_") and isinstance(table, dict)
        ]
        self._dicts += [
            (f"{type(module).__name__}.{name}", table)
            for module in model.modules()
            for name, table in vars(module).items()
            if name.endswith("_hooks") and isinstance(table, dict)
        ]
        self._hooks_before = [set(table) for _, table in self._dicts]
        self._hooks: list[tuple[str, Any, Any, Any]] = []
        self.active = True

    def find(self) -> list[str]:
        """Called after `attach`: what is different now."""
        for owner, before in self._before.items():
            now = dict(vars(owner))
            for name in before.keys() | now.keys():
                old, new = before.get(name, _MISSING), now.get(name, _MISSING)
                # What is new and nobody's but the agent's own costs nothing where it lies.
                if old is _MISSING and name.startswith("_rankscope"):
                    continue
                if old is not new and name not in ("__abstractmethods__", "_abc_impl"):
                    self._changes.append((owner, name, old, new))
        self._hooks = self._hooks_now()
        self._codes = [
            (f, code, f.__code__) for f, code in self._code_before.items() if f.__code__ is not code
        ]
        patched = [f"{o.__name__}.{name}" for o, name, _, _ in self._changes]
        patched += [f"{f.__module__}.{f.__qualname__}" for f, _, _ in self._codes]
        return sorted(patched + [name for name, _, _, _ in self._hooks])

    def switch(self, active: bool) -> None:
        """Puts the changes into force, or takes them out."""
        if active is self.active:
            return
        self.active = active
        for owner, name, old, new in self._changes:
            value = new if active else old
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        for function, old_code, new_code in self._codes:
            function.__code__ = new_code if active else old_code
        if not active:
            # Those of this moment: at steps at which nothing is due there are fewer.
            self._hooks = self._hooks_now()
        for _, table, key, hook in self._hooks:
            if active:
                table[key] = hook
            else:
                del table[key]

    def _hooks_now(self) -> list[tuple[str, Any, Any, Any]]:
        return [
            (name, table, key, table[key])
            for (name, table), known in zip(self._dicts, self._hooks_before, strict=True)
            for key in table
            if key not in known
        ]


class Trains(Protocol):
    """What an arm needs of a training."""

    @property
    def model(self) -> torch.nn.Module:
        """That is trained."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """That trains it."""

    def step(self) -> torch.Tensor:
        """One training step; its loss."""


Training = TypeVar("Training", bound=Trains)


class Arm(Protocol):
    """One way to train.

    Attributes:
        trainer: what trains, without what the arm does beside it.
    """

    trainer: Trainer

    def begin(self) -> None:
        """A block of it begins."""

    def step(self) -> None:
        """One step."""


class Agent(Generic[Training]):
    """The agent at default settings, attached for long, in force only while its blocks run.

    After its allowance: that is spent once, and says nothing of what a step costs from then on.

    Attributes:
        changed: names of what it has changed.
    """

    def __init__(self, trainer: Training, server: str, run: str) -> None:
        self.trainer = trainer
        self._changes = Changes(trainer.model)
        self.monitor = agent.attach(
            trainer.model, trainer.optimizer, server=server, run=run, allowance=0
        )
        self.changed = self._changes.find()
        self._paused = 0.0

    def begin(self) -> None:
        """In force again."""
        # Functions whose code was exchanged are slower at first, whichever of the two they have
        # now: so it is exchanged before every block or step, of every arm.
        self.pause()
        self._switch(True)

    def pause(self) -> None:
        """In force, and out of it; its threads live on."""
        self._switch(True)
        self._switch(False)

    def _switch(self, active: bool) -> None:
        if active is self._changes.active:
            return
        now = time.perf_counter()
        # It measures how long its own steps take, and would take those of the others for a part of
        # them: with twice as much time it would sample twice as often.
        account = getattr(self.monitor, "_account", None)  # a disabled one has none
        if active and account is not None:
            account.leave_out(now - self._paused)
        self._paused = now
        self._changes.switch(active)

    def step(self) -> None:
        """One step."""
        self.trainer.step()

    def tiers_due(self) -> int:
        """How many sampling tiers are due at the step in progress.

        -1 where none is but what the sample before has left over is done at its end.
        """
        # Known to the agent alone, and no user's business.
        machine = getattr(self.monitor, "_machine", None)
        if machine is None or machine.mode is COUNTED:
            return -1 if machine is not None and self.monitor._account.is_open else 0
        context = self.monitor._context
        return 1 + sum((context.signals, context.word, context.full, context.state))

    def sampled(self) -> bool:
        """Whether the step that ended last was sampled."""
        # Asked after the step: what is read before it, the step would find in the caches.
        timing = getattr(self.monitor, "_timing", None)  # a disabled one has none
        return timing is not None and timing._last == self.monitor._count.step - 1

    def close(self) -> None:
        """Takes it back for good."""
        self._switch(True)
        self.monitor.close()


class Plain(Generic[Training]):
    """Nothing beside the training.

    Args:
        other: the agent that is attached to the same trainer, if any.
    """

    def __init__(self, trainer: Training, other: Agent[Training] | None = None) -> None:
        self.trainer = trainer
        self._other = other

    def begin(self) -> None:
        """The agent is out of force."""
        if self._other is not None:
            self._other.pause()

    def step(self) -> None:
        """One step."""
        self.trainer.step()


class TensorBoard:
    """`SummaryWriter.add_scalar` of the scalars that the agent records, at every step.

    Computing them is not counted, except for the loss, which has to be read: accuracy and gradient
    norm are given as ready numbers.
    """

    def __init__(self, trainer: Trainer, folder: Path, other: Agent[Trainer]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.trainer = trainer
        self._other = other
        self._writer = SummaryWriter(str(folder))
        self._step = 0
        self._ended = time.perf_counter()

    def begin(self) -> None:
        """The agent is out of force."""
        self._other.pause()

    def step(self) -> None:
        """One step and its scalars."""
        loss = self.trainer.step()
        now = time.perf_counter()
        seconds, self._ended = now - self._ended, now
        add, step = self._writer.add_scalar, self._step
        add("loss", loss.item(), step)
        add("accuracy", 0.1, step)
        add("grad_norm", 1.0, step)
        add("lr", self.trainer.optimizer.param_groups[0]["lr"], step)
        add("step_seconds", seconds, step)
        add("samples_per_second", len(self.trainer.y) / seconds, step)
        self._step = step + 1

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()


class Background:
    """Processor time of what the agent does beside the training, for each step to be known.

    That of its threads and of the process that posts for it; read in 2 microseconds each.

    Attributes:
        known: False where there is no /proc; then nothing is ever counted.
    """

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self.known = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").exists()

    def find(self) -> None:
        """Finds them: call it when one was started or has ended."""
        found = {
            f"/proc/self/task/{thread.native_id}"
            for thread in threading.enumerate()
            if thread.name.startswith("rankscope") and thread.native_id
        }
        found |= {f"/proc/{pid}" for pid in uploaders()}
        for gone in self._files.keys() - found:
            os.close(self._files.pop(gone))
        for new in (found - self._files.keys()) if self.known else ():
            self._files[new] = os.open(f"{new}/schedstat", os.O_RDONLY)

    def seconds(self) -> float:
        """All of them together since they were started."""
        total = 0
        for file in self._files.values():
            try:
                total += int(os.pread(file, 64, 0).split()[0])
            except (ProcessLookupError, IndexError):
                continue  # it has ended
        return total / 1e9


def uploaders() -> list[int]:
    """Processes that post for this rank."""
    mine = {f"{name}={os.environ[name]}".encode() for name in ("RANK", "BENCHMARK_PLAN")}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if uploader_process.__file__.encode() in (
                process / "cmdline"
            ).read_bytes() and mine <= set((process / "environ").read_bytes().split(b"\0")):
                found.append(int(process.name))
        except OSError:
            continue  # it has ended, or is another user's
    return found
