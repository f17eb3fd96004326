"""3g: what faulty memory and faulty arithmetic do."""

from __future__ import annotations

import random

import torch

from tests.lab.faults.case import Expected, register
from tests.lab.faults.training import Training

# High bits of the mantissa: too little to see in the loss, and far above rounding.
_BIT = 1 << 20


def flip(tensor: torch.Tensor, index: int) -> None:
    """Flips one bit of one element."""
    tensor.detach().view(torch.int32).view(-1)[index % tensor.numel()] ^= _BIT


@register
class F60(Training):
    """A bit flips in a weight."""

    id = "F60"
    what = "one bit of one weight of one rank flips between two steps"

    def before_step(self) -> None:
        if self.is_target and self.step == self.at:
            flip(self.parameter(self.tensor), 7 * self.at)

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.parameters",),
            stages=("outside_optimizer",),
            ranks=self.odd_one(),
            tensors=frozenset({self.tensor}),
            step=self.at,
        )


@register
class F62(Training):
    """A bit flips in the optimizer's state."""

    id = "F62"
    what = "one bit of AdamW's second moment of one rank flips between two steps"

    def before_step(self) -> None:
        if self.is_target and self.step == self.at:
            flip(self.optimizer.state[self.parameter(self.tensor)]["exp_avg_sq"], 7 * self.at)

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.optimizer",),
            stages=("optimizer_state",),
            ranks=self.odd_one(),
            tensors=frozenset({self.tensor}),
            step=self.at,
        )


@register
class F64(Training):
    """A device that is wrong by a little, now and then."""

    id = "F64"
    what = "one rank's gradients have 1e-3 relative noise in 5 % of the steps"
    steps = 240
    onset = 0

    @property
    def length(self) -> int:
        """At default sampling few samples fall on one step in twenty: there have to be more."""
        return self.steps if self.setting.full else 2560

    def prepared(self) -> None:
        if self.is_target:
            self.generator = torch.Generator().manual_seed(self.seed)
            for parameter in self.net.parameters():
                parameter.register_hook(self._noisy)

    def before_step(self) -> None:
        self.wrong = random.Random(f"{self.seed}/{self.step}").random() < 0.05

    def _noisy(self, gradient: torch.Tensor) -> torch.Tensor:
        if not self.wrong:
            return gradient
        noise = torch.randn(gradient.shape, generator=self.generator)
        wrong: torch.Tensor = gradient + 1e-3 * gradient.norm() / gradient.numel() ** 0.5 * noise
        return wrong

    def expected(self) -> Expected:
        return Expected(
            kinds=("rank.gradient_outlier",),
            ranks=self.odd_one(),
            tolerance=self.length,
            severity="info",
        )


@register
class F64b(Training):
    """A device, or a trainer, whose gradients are wrong by a lot."""

    id = "F64b"
    what = "one rank's gradients are four times as large as they should be"
    steps = 160
    onset = 0

    def prepared(self) -> None:
        if self.is_target:
            for parameter in self.net.parameters():
                parameter.register_hook(lambda gradient: 4 * gradient)

    def expected(self) -> Expected:
        return Expected(
            kinds=("rank.gradient_outlier",),
            ranks=self.odd_one(),
            # Of two ranks nobody can know whether it is a fault or their data.
            severity="warning" if self.world > 2 else "info",
        )
