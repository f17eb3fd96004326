"""3e: buffers and random state."""

from __future__ import annotations

import torch
from torch import nn

from tests.lab.faults.case import Expected, register
from tests.lab.faults.models import Samples
from tests.lab.faults.sharded import TensorParallel
from tests.lab.faults.training import Training


@register
class F42(Training):
    """Batch statistics of each rank, and an evaluation that shows it."""

    id = "F42"
    what = "running statistics of very different data are never shared; evaluations differ by rank"
    models = ("cnn",)
    broadcast_buffers = False

    def batch(self, inputs: torch.Tensor, targets: torch.Tensor) -> Samples:
        return inputs * (1 + self.rank) + self.rank, targets

    def after_step(self) -> None:
        if self.step in (29, 49):
            self.evaluate(self.test_set)

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.buffers",),
            stages=("buffers",),
            ranks=self.all(),
            # They differ from step 0; that it does harm shows at the first evaluation.
            tolerance=30,
        )


@register
class F43(Training):
    """Batch statistics estimated anew from different numbers of samples."""

    id = "F43"
    what = "before one step BatchNorm is re-estimated, on one rank from half the samples, and used"
    models = ("cnn",)
    broadcast_buffers = False

    again = True

    def next_sample(self) -> int:
        """Two ranks diverge in any case: frozen statistics take a second sample."""
        last = super().next_sample()
        if last > self.step or self.world > 2 or self.setting.full or not self.again:
            return last
        self.again = False
        return self.step + 200

    def build(self) -> nn.Module:
        net = super().build()
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.0  # only the re-estimation moves them
        return net

    @torch.no_grad()
    def before_step(self) -> None:
        if self.step != self.at:
            return
        norms = [m for m in self.net.modules() if isinstance(m, nn.BatchNorm2d)]
        for norm in norms:
            norm.momentum = 1.0
        self.net(self.training_set[0][: 128 if self.is_target else 256])
        for norm in norms:
            norm.momentum = 0.0
        self.evaluate(self.test_set)

    def expected(self) -> Expected:
        names = [f"bn{i}.running_{what}" for i in (1, 2) for what in ("mean", "var")]
        return Expected(
            kinds=("desync.buffers",),
            stages=("buffers",),
            ranks=self.odd_one(),
            tensors=frozenset(names),
            step=self.at,
        )


@register
class F45(TensorParallel):
    """One rank of a tensor-parallel pair has drawn one number more."""

    id = "F45"
    what = "at one step one rank of a tensor-parallel pair with dropout draws a random number"
    dropout = 0.2

    def before_step(self) -> None:
        if self.is_target and self.step == self.at:
            torch.rand(1)

    def expected(self) -> Expected:
        pair = frozenset({self.suspects, self.suspects ^ 1})
        return Expected(
            # The contract has no kind for it.
            kinds=("desync.rng", "desync.random"),
            ranks=(frozenset({self.suspects}), pair),
            step=self.at,
        )


@register
class F46(Training):
    """All ranks draw the same random numbers."""

    id = "F46"
    what = "all data-parallel ranks have the same seed, and dropout"
    dropout = 0.3
    onset = 0

    def own_seed(self) -> int:
        return 1_000_000 + self.seed

    def expected(self) -> Expected:
        return Expected(
            # Advice and no alarm; the contract has no kind for it.
            kinds=("rng.shared", "random.shared"),
            ranks=self.everybody(),
            tolerance=8,
            severity="info",
            ceiling="info",
        )
