"""3f: data."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.lab.faults.case import Expected, register
from tests.lab.faults.models import Samples, batches_of, epoch_steps, order_of
from tests.lab.faults.optimizer import LeftAlone
from tests.lab.faults.resumed import Resumed
from tests.lab.faults.sharded import TensorParallel
from tests.lab.faults.training import Training


@register
class F50(Training):
    """Every rank reads the same batches."""

    id = "F50"
    what = "no DistributedSampler: all ranks read the same batches"
    onset = 0

    def share(self) -> tuple[int, int]:
        return 0, self.world

    def expected(self) -> Expected:
        return Expected(kinds=("data.duplicated",), ranks=self.everybody())


@register
class F51(Training):
    """Every rank shuffles by its own seed."""

    id = "F51"
    what = "the sampler's seed is the rank: shares overlap, and samples are left out"
    onset = 0

    def rows(self, epoch: int) -> Iterator[torch.Tensor]:
        order = order_of(epoch, seed=self.seed + 100 * self.rank)
        yield from batches_of(order, rank=self.rank, world=self.world)

    def expected(self) -> Expected:
        return Expected(
            kinds=("data.overlap",), ranks=self.everybody(), tolerance=epoch_steps(self.world)
        )


@register
class F52(Training):
    """Every epoch has the same order."""

    id = "F52"
    what = "`set_epoch` is never called: every epoch repeats the order of the first"
    steps = 80

    def rows(self, epoch: int) -> Iterator[torch.Tensor]:
        yield from super().rows(0)

    def expected(self) -> Expected:
        epoch = epoch_steps(self.world)
        return Expected(
            kinds=("data.unshuffled",), ranks=self.everybody(), step=epoch, tolerance=epoch
        )


@register
class F53(Resumed):
    """After a restart the loader begins at the first batch again."""

    id = "F53"
    what = "after a restart everything goes on but the loader, which begins anew"

    def batches_to_skip(self) -> int:
        return 0

    def expected(self) -> Expected:
        return Expected(kinds=("data.replayed",), ranks=self.everybody(), step=self.resumed_at)


@register
class F54(Training):
    """Unequal batches averaged with equal weight."""

    id = "F54"
    what = "one rank's batches have 2 samples, the others' 16; gradients are averaged as if equal"
    onset = 0

    def batch(self, inputs: torch.Tensor, targets: torch.Tensor) -> Samples:
        return (inputs[:2], targets[:2]) if self.is_target else (inputs, targets)

    def expected(self) -> Expected:
        return Expected(kinds=("data.imbalanced",), ranks=self.one(), tolerance=8)


class BadLabels(Training):
    """One rank's labels do not belong to its inputs."""

    steps = 200
    onset = 100

    def batch(self, inputs: torch.Tensor, targets: torch.Tensor) -> Samples:
        if self.is_target and self.step >= self.at:
            targets = targets[torch.randperm(len(targets))]
        return inputs, targets

    def expected(self) -> Expected:
        return Expected(
            kinds=("rank.loss_outlier", "data.outlier", "rank.gradient_outlier"),
            ranks=self.odd_one(),
            step=self.at,
            tolerance=50,
        )


@register
class F55(BadLabels):
    """One rank has bad data."""

    id = "F55"
    what = "from one step on one rank's labels are shuffled"


@register
class F56(TensorParallel):
    """The ranks of a tensor-parallel pair read different batches."""

    id = "F56"
    what = "from one step on one rank of a tensor-parallel pair reads other batches"

    def batch(self, inputs: torch.Tensor, targets: torch.Tensor) -> Samples:
        if self.is_target and self.step >= self.at:
            return inputs.flip(0), targets.flip(0)
        return inputs, targets

    def expected(self) -> Expected:
        pair = frozenset({self.suspects, self.suspects ^ 1})
        return Expected(
            kinds=("desync.batch",),
            stages=("batch",),
            ranks=(frozenset({self.suspects}), pair),
            step=self.at,
        )


@register
class F57(LeftAlone):
    """One rank runs out of data."""

    id = "F57"
    what = "one rank is a batch short and waits at the end; the others wait in a step"

    def before_step(self) -> None:
        if self.is_target and self.step == self.at:
            self.wait_forever()

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.progress", "rank.stalled", "rank.starved"),
            ranks=self.one(),
            step=self.at,
            tolerance=1,
        )
