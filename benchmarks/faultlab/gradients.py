"""3b: gradients that are not, or wrongly, combined."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.faultlab.case import Expected, register
from benchmarks.faultlab.models import Samples
from benchmarks.faultlab.training import Manual, Training

_REDUCED = ("reduced_gradient",)


@register
class F10(Training):
    """The forward goes around DDP."""

    id = "F10"
    what = "the trainer calls `ddp.module(x)`: no gradient is ever reduced"
    onset = 0

    def forward(self, batch: Samples) -> torch.Tensor:
        loss: torch.Tensor = self.criterion(self.model.module(batch[0]), batch[1])
        return loss

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.gradients",),
            stages=_REDUCED,
            ranks=(frozenset(range(self.world)),),
            severity="critical",
        )


@register
class F18(Manual):
    """A sum instead of a mean."""

    id = "F18"
    what = "from one step on the reduced gradient is not divided by the number of ranks"

    def reduce_one(self, name: str, parameter: nn.Parameter) -> None:
        super().reduce_one(name, parameter)
        if self.step >= self.at:
            assert parameter.grad is not None
            parameter.grad *= self.world

    def expected(self) -> Expected:
        return Expected(
            kinds=("reduction.wrong",), stages=_REDUCED, ranks=self.everybody(), step=self.at
        )


@register
class F19(Manual):
    """The reduction never leaves pairs of ranks."""

    id = "F19"
    what = "from one step on gradients are reduced inside {0,1} and {2,3} only"
    worlds = (4,)

    def prepared(self) -> None:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        self.pair = pairs[self.rank // 2]

    def reduce_one(self, name: str, parameter: nn.Parameter) -> None:
        if self.step < self.at:
            super().reduce_one(name, parameter)
            return
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=self.pair)
        parameter.grad /= 2

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.gradients",),
            stages=_REDUCED,
            ranks=(frozenset(range(4)),),
            step=self.at,
        )


@register
class F24(Manual):
    """A collective gives zeros to one rank."""

    id = "F24"
    what = "at one step the all-reduce of one tensor gives zeros to one rank"

    def reduce_one(self, name: str, parameter: nn.Parameter) -> None:
        super().reduce_one(name, parameter)
        if self.is_guilty and self.step == self.at and name == self.tensor:
            assert parameter.grad is not None
            parameter.grad.zero_()

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.gradients",),
            stages=_REDUCED,
            ranks=self.odd_one(),
            tensors=frozenset({self.tensor}),
            step=self.at,
        )
