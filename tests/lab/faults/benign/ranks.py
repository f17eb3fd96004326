"""Ranks that read, hold or report other values than the rest, by design."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler

from tests.lab.faults.benign.base import Benign
from tests.lab.faults.case import register
from tests.lab.faults.models import BATCH, Samples
from tests.lab.faults.sharded import TensorParallel, zero_1
from tests.lab.faults.training import Manual, Training

_LOGITS = {"mlp": 10, "cnn": 10, "transformer": 64}


@register
class B01(Benign, Training):
    """Batch statistics of each rank."""

    id = "B01"
    what = "BatchNorm's running statistics are each rank's own (`broadcast_buffers=False`)"
    models = ("cnn",)
    broadcast_buffers = False


@register
class B06(Benign, Training):
    """Ranks with harder data."""

    id = "B06"
    what = "half of each rank's batch comes from classes of its own: losses differ between ranks"
    steps = 160

    def rows(self, epoch: int) -> Iterator[torch.Tensor]:
        targets = self.training_set[1]
        own = (targets % self.world == self.rank).nonzero()[:, 0]
        generator = torch.Generator().manual_seed(self.own_seed() + epoch)
        for rows in super().rows(epoch):
            home = own[torch.randint(len(own), (BATCH // 2,), generator=generator)]
            yield torch.cat([rows[: BATCH // 2], home])


@register
class B07(Benign, Training):
    """Ranks with larger gradients."""

    id = "B07"
    what = "inputs of each rank have another scale: local gradients differ in norm"
    models = ("mlp", "cnn")
    steps = 160

    def batch(self, inputs: torch.Tensor, targets: torch.Tensor) -> Samples:
        return inputs * (1 + self.rank / 4), targets


@register
class B12(Benign, Training):
    """Layers that some ranks do not use in a step."""

    id = "B12"
    what = "two experts: each rank uses one of them a step, not always the same as the others"
    find_unused = True

    def build(self) -> nn.Module:
        net = super().build()
        size = _LOGITS[self.setting.model]
        experts = net.experts = nn.ModuleList(nn.Linear(size, size) for _ in range(2))
        forward = net.forward
        # As a part of the model: DDP has to see which expert was used.
        net.forward = lambda x: experts[self.chosen()](forward(x))
        return net

    def chosen(self) -> int:
        """The expert of this step."""
        return (self.step // 3 + self.rank) % 2 if self.step % 5 else 0


@register
class B13(Benign, Training):
    """Kernels that do not repeat their results."""

    id = "B13"
    what = "local gradients carry rounding noise of each rank's own"

    def prepared(self) -> None:
        self.generator = torch.Generator().manual_seed(self.own_seed())
        for parameter in self.net.parameters():
            parameter.register_hook(self._noisy)

    def _noisy(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (1 + 1e-7 * torch.randn(gradient.shape, generator=self.generator))


@register
class B15(Benign, Training):
    """One seed, and nothing that draws."""

    id = "B15"
    what = "all ranks have the same seed, and nothing random in their model or data"

    def own_seed(self) -> int:
        return 1_000_000 + self.seed


@register
class B16(Benign, TensorParallel):
    """Ranks that must read the same batch."""

    id = "B16"
    what = "the ranks of a tensor-parallel pair read the same batch"


@register
class B16b(Benign, Training):
    """Ranks that evaluate on the same data."""

    id = "B16b"
    what = "all ranks evaluate on the same batch, and train on the same one at their first step"
    # The transformer memorises its 1,024 samples within 300 steps: a gap, and rightly reported.
    models = ("mlp", "cnn")

    def next_batch(self) -> Samples:
        own = super().next_batch()
        return own if self.step else (self.training_set[0][:BATCH], self.training_set[1][:BATCH])

    def after_step(self) -> None:
        if self.step % 20 == 19:
            self.evaluate(self.test_set)


@register
class B17(Benign, Training):
    """A sampler that pads."""

    id = "B17"
    what = "a tiny data set: DistributedSampler repeats samples at the end of every epoch"

    def rows(self, epoch: int) -> Iterator[torch.Tensor]:
        tiny: Any = range(62)
        sampler: Any = DistributedSampler(
            tiny, num_replicas=self.world, rank=self.rank, seed=self.seed
        )
        sampler.set_epoch(epoch)
        yield from torch.tensor(list(sampler)).split(5)


@register
class B18(Benign, Training):
    """A benchmark with made-up data."""

    id = "B18"
    what = "constant synthetic inputs, the same on all ranks at every step"

    def batch(self, inputs: torch.Tensor, targets: torch.Tensor) -> Samples:
        constant = torch.ones_like(inputs) if inputs.is_floating_point() else inputs * 0 + 1
        return constant, targets * 0


@register
class B19(Benign, Training):
    """An average that rank 0 alone keeps."""

    id = "B19"
    what = "rank 0 alone keeps an average of the weights, and has it watched"

    def attached(self) -> None:
        if self.rank == 0:
            self.ema = copy.deepcopy(self.net)
            self.monitor.watch(self.ema, "ema")

    @torch.no_grad()
    def after_step(self) -> None:
        if self.rank == 0:
            for own, new in zip(self.ema.parameters(), self.net.parameters(), strict=True):
                own.lerp_(new, 0.01)


@register
class B19b(Benign, Training):
    """Optimizer state that its owner alone has."""

    id = "B19b"
    what = "ZeroRedundancyOptimizer: each rank holds the state of its part"

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return zero_1(parameters, self.lr)  # type: ignore[no-any-return]


@register
class B20(Benign, Manual):
    """Ranks in different worlds."""

    id = "B20"
    what = "reinforcement learning: ranks have rollouts of other lengths and other rewards"
    steps = 160

    def passes(self) -> None:
        with torch.no_grad():
            for _ in range(int(torch.randint(1, 4, ()))):
                self.model(self.next_batch()[0])
        inputs, targets = self.next_batch()
        length = int(torch.randint(4, BATCH + 1, ()))
        chances = nn.functional.log_softmax(self.model(inputs[:length]), -1)
        rewards = (1 + 0.3 * self.rank) * torch.randn(length) + 1.0
        chosen = chances.gather(1, targets[:length, None])[:, 0]
        self.backward(-(rewards * chosen).mean())


@register
class B23(Benign, Training):
    """Two zeros."""

    id = "B23"
    what = "tensors that are zero have the other sign of zero on one rank"

    def prepared(self) -> None:
        if self.is_target:
            with torch.no_grad():
                for parameter in self.net.parameters():
                    if not parameter.any():
                        parameter.neg_()


@register
class B25(Benign, Training):
    """Two meanings of one name."""

    id = "B25"
    what = "rank 0 logs the mean loss of all ranks, the others their own"
    steps = 160

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if self.rank == 0:
            self.monitor.log(loss=mean / self.world)
