"""3a: what is wrong before the first step."""

from __future__ import annotations

import torch

from benchmarks.faultlab.case import Expected, register
from benchmarks.faultlab.training import Manual, Training


@register
class F01(Manual):
    """Replicas that start from different weights."""

    id = "F01"
    what = "every rank draws its own first weights and nobody broadcasts; gradients are reduced"
    onset = 0

    def first_seed(self) -> int:
        return 1000 + 100 * self.rank + self.seed

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.parameters",),
            stages=("start",),
            ranks=(frozenset(range(self.world)),),
            severity="critical",
        )


@register
class F06(Training):
    """DDP's broadcast at construction delivered wrong data."""

    id = "F06"
    what = "one tensor of one rank is off by 1e-3 after DDP has made all ranks equal"
    onset = 0

    def prepared(self) -> None:
        if self.is_guilty:
            with torch.no_grad():
                self.parameter(self.tensor).add_(1e-3)

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.parameters",),
            stages=("start",),
            ranks=self.odd_one(),
            tensors=frozenset({self.tensor}),
        )


@register
class F07(Training):
    """Another configuration on one rank: learning rate."""

    id = "F07"
    what = "one rank is configured with twice the learning rate"
    onset = 0

    def make_optimizer(self, parameters):  # type: ignore[no-untyped-def]
        return torch.optim.AdamW(parameters, lr=self.lr * (2 if self.is_guilty else 1))

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.config", "desync.hyperparameters"),
            stages=("start", "hyperparameters"),
            ranks=self.odd_one(),
        )
