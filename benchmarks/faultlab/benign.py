"""Section 4: what looks like a fault and is none."""

from __future__ import annotations

import torch

from benchmarks.faultlab.case import Expected, register
from benchmarks.faultlab.models import Samples
from benchmarks.faultlab.training import Training


class Benign:
    """There must be no alert of severity warning or above."""

    def expected(self) -> Expected:
        return Expected()


@register
class B00(Benign, Training):
    """Nothing special at all."""

    id = "B00"
    what = "plain DDP training"
    steps = 100


@register
class B01(Benign, Training):
    """Batch statistics of each rank."""

    id = "B01"
    what = "BatchNorm's running statistics are each rank's own (`broadcast_buffers=False`)"
    models = ("cnn",)
    broadcast_buffers = False


@register
class B04(Benign, Training):
    """Gradient accumulation."""

    id = "B04"
    what = "two micro-batches a step, the first one under `no_sync`"

    def passes(self) -> None:
        with self.model.no_sync():  # type: ignore[operator]
            self.backward(self.forward(self.next_batch()) / 2)
        self.backward(self.forward(self.next_batch()) / 2)


@register
class B09(Benign, Training):
    """A schedule with steps and restarts."""

    id = "B09"
    what = "the learning rate drops to a tenth, and a cosine schedule restarts"
    steps = 120

    def prepared(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(self.optimizer, 40)

    def after_step(self) -> None:
        self.scheduler.step()
        if self.step == 70:
            for group in self.optimizer.param_groups:
                group["initial_lr"] /= 10
            self.scheduler.base_lrs = [lr / 10 for lr in self.scheduler.base_lrs]


@register
class B18(Benign, Training):
    """A benchmark with made-up data."""

    id = "B18"
    what = "constant synthetic inputs, the same on all ranks at every step"

    def batch(self, inputs: torch.Tensor, targets: torch.Tensor) -> Samples:
        constant = torch.ones_like(inputs) if inputs.is_floating_point() else inputs * 0 + 1
        return constant, targets * 0
