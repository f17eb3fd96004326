"""A trainer that is launched twice: it saves, and goes on from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch

from tests.lab.faults.training import Training


class Resumed(Training):
    """Trains to `resumed_at`, ends; launched again, it loads the checkpoint and trains to the end.

    Attributes:
        resumed_at: steps of the first launch.
        early_at: step before which an older checkpoint is written.
    """

    launches = 2
    resumed_at: ClassVar[int] = 30
    early_at: ClassVar[int] = 20

    def loads_model(self) -> bool:
        """Whether this rank loads the weights."""
        return True

    def loads_optimizer(self) -> bool:
        """Whether this rank loads the optimizer's state."""
        return True

    def first_step(self) -> int:
        """The step at which this rank goes on."""
        return self.resumed_at

    def checkpoint(self) -> str:
        """Which checkpoint this rank loads."""
        return "last"

    def batches_to_skip(self) -> int:
        """Batches that this rank's loader leaves out after the restart."""
        return self.resumed_at

    def train(self) -> None:
        """One launch."""
        self.prepare()
        last = self.steps
        if self.setting.launch == 0:
            last = self.resumed_at
        else:
            self.step = self.first_step()
            last = self.step + self.length - self.resumed_at
            self.load(self.checkpoint())
        self.monitor = self.attach(step=self.step)
        with self.monitor:
            while self.step < last:
                if self.setting.launch == 0 and self.step == self.early_at:
                    self.save("early")
                self.one_step()
                self.step += 1
        if self.setting.launch == 0:
            self.save("last")

    def save(self, name: str) -> None:
        """Rank 0 writes a checkpoint."""
        if self.rank == 0:
            held = {"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(held, self._path(name))

    def load(self, name: str) -> None:
        """Loads what this rank loads."""
        held: dict[str, Any] = torch.load(self._path(name))
        if self.loads_model():
            self.net.load_state_dict(held["model"])
        if self.loads_optimizer():
            self.optimizer.load_state_dict(held["optimizer"])
        for _ in range(self.batches_to_skip()):
            next(self._source)

    def _path(self, name: str) -> Path:
        return Path(self.setting.folder) / f"{name}.pt"
