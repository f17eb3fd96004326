"""3a: what is wrong before the first step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from tests.lab.faults.case import Expected, register
from tests.lab.faults.models import build
from tests.lab.faults.resumed import Resumed
from tests.lab.faults.sharded import Sharded
from tests.lab.faults.training import Manual, Training


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
            kinds=("desync.parameters",), stages=("start",), ranks=self.all(), severity="critical"
        )


@register
class F02(Sharded):
    """Replica groups of a sharded model that were drawn with different seeds."""

    id = "F02"
    what = "HSDP 2x2 whose ranks draw their own first weights; `fully_shard` does not broadcast"
    worlds = (4,)
    onset = 0
    replicated = True

    def first_seed(self) -> int:
        return 1000 + 100 * self.rank + self.seed

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.parameters",), stages=("start",), ranks=self.all(), severity="critical"
        )


@register
class F03(Resumed):
    """A checkpoint that one rank alone has loaded."""

    id = "F03"
    what = "after a restart rank 0 alone loads the checkpoint, after wrapping"

    def loads_model(self) -> bool:
        return self.rank == 0

    def loads_optimizer(self) -> bool:
        return self.rank == 0

    def expected(self) -> Expected:
        # Whoever remembers the run knows that the others are wrong; else rank 0 is the odd one.
        others = frozenset(range(1, self.world))
        sides = (others, frozenset({0}))
        both = (frozenset({0, 1}),) if self.world == 2 else ()
        return Expected(
            kinds=("desync.parameters",),
            stages=("start",),
            ranks=(*sides, *both),
            step=self.resumed_at,
        )


@register
class F04(Resumed):
    """Optimizer state that one rank alone has restored."""

    id = "F04"
    what = "after a restart all ranks load the weights, and rank 0 alone the optimizer's state"

    def loads_optimizer(self) -> bool:
        return self.rank == 0

    def expected(self) -> Expected:
        others = frozenset(range(1, self.world))
        both = (frozenset({0, 1}),) if self.world == 2 else ()
        return Expected(
            kinds=("desync.optimizer",),
            stages=("start",),
            ranks=(others, frozenset({0}), *both),
            step=self.resumed_at,
        )


@register
class F05(Resumed):
    """A rank that does not know how far the run is."""

    id = "F05"
    what = "after a restart one rank begins to count at step 0, the others go on at 30"

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05)

    def first_step(self) -> int:
        return 0 if self.is_target else self.resumed_at

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.progress",),
            stages=("start",),
            ranks=self.odd_one(),
            step=self.resumed_at,
            # The attempt begins at two steps at once.
            tolerance=self.resumed_at,
        )


@register
class F06(Training):
    """DDP's broadcast at construction delivered wrong data."""

    id = "F06"
    what = "one tensor of one rank is off by 1e-3 after DDP has made all ranks equal"
    onset = 0

    def prepared(self) -> None:
        if self.is_target:
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

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.lr * (2 if self.is_target else 1))

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.config", "desync.hyperparameters"),
            stages=("start", "hyperparameters"),
            ranks=self.odd_one(),
        )


@register
class F07b(Training):
    """Another configuration on one rank: dropout."""

    id = "F07b"
    what = "one rank is configured with dropout 0.5, the others without"
    onset = 0

    def build(self) -> nn.Module:
        return build(self.setting.model, 0.5 if self.is_target else 0.0)

    def expected(self) -> Expected:
        return Expected(kinds=("desync.config",), stages=("start",), ranks=self.odd_one())


@register
class F08(Manual):
    """Another set of trainable parameters on one rank."""

    id = "F08"
    what = "one rank freezes `head` before the optimizer is built"
    onset = 0

    def prepared(self) -> None:
        if self.is_target:
            for name in ("head.weight", "head.bias"):
                self.parameter(name).requires_grad_(False)
            trainable = [p for p in self.net.parameters() if p.requires_grad]
            self.optimizer = torch.optim.AdamW(trainable, lr=self.lr)

    def names(self) -> list[str]:
        return [name for name, _ in self.net.named_parameters()]

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.config",),
            stages=("start",),
            ranks=self.odd_one(),
            tensors=frozenset({"head.weight", "head.bias"}),
        )
