"""3c: clipping, loss scales, precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import nn

from tests.lab.faults.case import Expected, register
from tests.lab.faults.models import Samples
from tests.lab.faults.sharded import zero_1
from tests.lab.faults.training import Manual, Training


@register
class F25(Training):
    """One rank clips, the others do not."""

    id = "F25"
    what = "from one step on one rank alone clips its gradients"

    def clip(self) -> None:
        if self.is_target and self.step >= self.at:
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.05)

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.gradients",),
            stages=("clipped_gradient",),
            ranks=self.odd_one(),
            step=self.at,
        )


@register
class F26(Training):
    """Every rank clips by the norm of its own shard."""

    id = "F26"
    what = "ZeRO-1: from one step on each rank clips the tensors it updates by the norm of those"

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        self.zero = zero_1(parameters, self.lr)
        return self.zero  # type: ignore[no-any-return]

    def clip(self) -> None:
        groups = self.zero.optim.param_groups
        own = [parameter for group in groups for parameter in group["params"]]
        chosen = own if self.step >= self.at else list(self.net.parameters())
        nn.utils.clip_grad_norm_(chosen, 0.05)

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.gradients",),
            stages=("clipped_gradient",),
            ranks=self.all(),
            step=self.at,
        )


class Scaled(Training):
    """Trains with torch's GradScaler."""

    init_scale: ClassVar[float] = 65536.0
    lr = 0.05

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr, momentum=0.9)

    def prepared(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=self.init_scale)

    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()

    def apply(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


@register
class F27(Scaled):
    """Clipped before the scale is taken off."""

    id = "F27"
    what = "from one step on gradients are clipped before `scaler.unscale_`"
    steps = 80

    def clip(self) -> None:
        if self.step < self.at:
            self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.net.parameters(), 5.0)

    def expected(self) -> Expected:
        return Expected(
            kinds=("clipping.saturated",), ranks=self.everybody(), step=self.at, tolerance=5
        )


@register
class F28(Manual):
    """One rank alone finds an overflow and skips the step."""

    id = "F28"
    what = "at one step one rank finds inf in its reduced gradient and skips the step alone"

    def reduced(self, gradients: dict[str, torch.Tensor]) -> None:
        if self.is_target and self.step == self.at:
            gradients[self.tensor].view(-1)[0] = torch.inf
        self.found_inf = not all(bool(g.isfinite().all()) for g in gradients.values())

    def apply(self) -> None:
        if not self.found_inf:
            super().apply()

    def expected(self) -> Expected:
        return Expected(kinds=("desync.progress",), ranks=self.odd_one(), step=self.at)


@register
class F29(Scaled):
    """The loss scale of one rank is another."""

    id = "F29"
    what = "from one step on one rank's loss scale is half that of the others"

    def before_step(self) -> None:
        if self.is_target and self.step == self.at:
            self.scaler.update(self.init_scale / 2)

    def expected(self) -> Expected:
        return Expected(
            # The scale is a setting, and the gradients are weighted unequally because of it.
            kinds=("desync.hyperparameters", "desync.gradients"),
            stages=("hyperparameters", "reduced_gradient", "clipped_gradient"),
            ranks=self.odd_one(),
            step=self.at,
        )


@register
class F31(Manual):
    """The optimizer works in bfloat16."""

    id = "F31"
    what = "weights and AdamW's state are bfloat16, without float32 master weights"
    models = ("mlp", "transformer")
    onset = 0
    lr = 1e-4

    def build(self) -> nn.Module:
        return super().build().bfloat16()

    def batch(self, inputs: torch.Tensor, targets: torch.Tensor) -> Samples:
        return inputs.bfloat16() if inputs.is_floating_point() else inputs, targets

    def forward(self, batch: Samples) -> torch.Tensor:
        loss: torch.Tensor = self.criterion(self.model(batch[0]).float(), batch[1])
        return loss

    def expected(self) -> Expected:
        return Expected(
            kinds=("update.missing", "update.ratio"), ranks=self.everybody(), tolerance=10
        )


class RoundingSGD(torch.optim.SGD):
    """Plain SGD that may do its arithmetic in float64."""

    exact = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if self.exact:
                    moved = parameter.double() - group["lr"] * parameter.grad.double()
                    parameter.copy_(moved.float())
                else:
                    parameter.sub_(parameter.grad * group["lr"])


@register
class F32(Training):
    """One rank rounds differently."""

    id = "F32"
    what = "one rank does its update in float64 and rounds, the others work in float32"
    onset = 0

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = RoundingSGD(parameters, lr=0.05)
        optimizer.exact = self.is_target
        return optimizer

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.parameters",),
            stages=("parameters",),
            ranks=self.odd_one(),
            tolerance=10,
            severity="info",
            ceiling="info",
        )
