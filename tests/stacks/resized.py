"""A trainer under torchrun's elastic launch: it saves, and goes on with another number of ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from rankscope import agent
from tests.lab.faults.case import Expected
from tests.lab.faults.models import BATCH, SAMPLES, batches_of, order_of
from tests.lab.faults.training import Training, sample_all
from tests.stacks import faults
from tests.stacks.options import agent_options

_LONGEST_WAIT = 120.0


def begin() -> int:
    """Joins the group, in a fork of torchrun's own process: its handler is not ours."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return faults.begin()


class Resized(Training):
    """Saves every 16 steps; the job changes in the middle, and goes on from the last checkpoint.

    `world` is the number of ranks after the change.

    Attributes:
        every: steps from one checkpoint to the next.
        changes_at: first step that is not trained before the change; those since the last
            checkpoint are trained again.
    """

    steps = 100
    every: ClassVar[int] = 16
    changes_at: ClassVar[int] = 37

    @property
    def resumed_at(self) -> int:
        """Step of the last checkpoint before the change."""
        return self.changes_at // self.every * self.every

    def checkpoint(self) -> int:
        """Step of the checkpoint that this rank loads after the change."""
        return self.resumed_at

    def loads_model(self) -> bool:
        """Whether this rank loads the weights."""
        return True

    def share(self) -> tuple[int, int]:
        return self.rank, dist.get_world_size()

    def rows(self, epoch: int) -> Iterator[torch.Tensor]:
        order = order_of(epoch, seed=self.seed)
        # What the ranks before the change have read of its first epoch is left out.
        left, self.read = order[self.read :], 0
        part, parts = self.share()
        yield from batches_of(left, rank=part, world=parts)

    def attach(self, **options: Any) -> Any:
        # Run and step are not given: they are torchrun's and the optimizer's.
        plain = {**agent_options(self.setting), **options}
        plain.pop("run")
        monitor = agent.attach(self.model, self.optimizer, **plain)
        sample_all(monitor, self.setting)
        return monitor

    def train(self) -> None:
        self.read = 0
        self.prepare()
        self.first_step = 0
        self.resumed = dist.get_world_size() == self.world
        if self.resumed:
            if not self._path(self.resumed_at).exists():
                self._wait()  # the other node is late: torchrun starts all again when it comes
            self.load(self.checkpoint())
        last = self.step + self.length - self.resumed_at if self.resumed else self.changes_at
        self.monitor = self.attach()
        with self.monitor:
            while self.step < last:
                if self.step and self.step % self.every == 0:
                    self.save()
                self.one_step()
                self.step += 1
            if not self.resumed:
                self.change()

    def change(self) -> None:
        """Here the job is changed by its launcher, while some ranks wait for the others."""
        second = os.environ["ELASTIC_NODE"] == "1"
        if (second or dist.get_world_size() < self.world) and os.environ["LOCAL_RANK"] == "0":
            Path(self.setting.folder, "reached").touch()
        if second or dist.get_world_size() < self.world:
            self._wait()
        self.one_step()

    def save(self) -> None:
        """Rank 0 writes a checkpoint."""
        if self.rank == 0:
            held = {
                "model": self.net.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "samples": self.step * BATCH * dist.get_world_size(),
            }
            unfinished = self._path(self.step).with_suffix(".part")
            torch.save(held, unfinished)
            unfinished.rename(self._path(self.step))

    def load(self, step: int) -> None:
        """Goes on from a checkpoint."""
        held: dict[str, Any] = torch.load(self._path(step))
        if self.loads_model():
            self.net.load_state_dict(held["model"])
        self.optimizer.load_state_dict(held["optimizer"])
        self.step = held["step"]
        self.epoch, self.read = divmod(held["samples"], SAMPLES)

    def _wait(self) -> None:
        time.sleep(_LONGEST_WAIT)
        raise TimeoutError("the launcher has changed nothing")

    def _path(self, step: int) -> Path:
        return Path(self.setting.folder) / f"{step}.pt"


class OlderCheckpoint:
    """One rank goes on from the checkpoint before the last."""

    id = "older-checkpoint"
    what = "after the change one rank loads the checkpoint of step 16, the others that of step 32"

    def checkpoint(self: Any) -> int:
        return self.resumed_at - (self.every if self.is_target else 0)

    def expected(self: Any) -> Expected:
        return Expected(
            kinds=("desync.parameters", "desync.progress"),
            stages=("start",),
            ranks=self.odd_one(),
            step=self.resumed_at,
            # The attempt begins at two steps at once.
            tolerance=self.every,
        )


class OwnWeights:
    """One rank does not load the weights: after wrapping, nobody mends it."""

    id = "own-weights"
    what = "after the change one rank loads everything but the weights"

    def loads_model(self: Any) -> bool:
        return not self.is_target

    def expected(self: Any) -> Expected:
        return Expected(
            kinds=("desync.parameters",),
            stages=("start",),
            ranks=self.odd_one(),
            step=self.resumed_at,
        )
