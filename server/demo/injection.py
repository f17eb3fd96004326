"""How the faults of the demo are done inside a training process.

The training loop calls the three methods of an `Injector` at every step; without a fault they do
nothing.
"""

# No `from __future__ import annotations` in here: DDP refuses a communication hook whose
# annotations are text.

import os
import signal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from rankscope.server.demo.faults import Injection

# Among these bits of a float32 a flip changes the value by a share of 2^-11 up to a factor of 2:
# too little to see in the loss, and enough that no two ranks agree any more.
_LOWEST_BIT, _HIGHEST_BIT = 12, 23


class Injector:
    """No fault.

    Args:
        injection: what is to be broken.
        rank: rank of this process.
        seed: of the fault's own random numbers.
    """

    def __init__(self, injection: Injection, *, rank: int, seed: int) -> None:
        self.injection = injection
        self.generator = torch.Generator().manual_seed(seed)
        self.is_target = injection.rank is None or injection.rank == rank

    def wrapped(self, model: DistributedDataParallel) -> None:
        """DDP has wrapped the model; nothing has been trained yet."""

    def before_step(
        self, step: int, model: DistributedDataParallel, optimizer: torch.optim.Optimizer
    ) -> None:
        """A step is about to begin."""

    def batch(
        self, step: int, images: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch with which the step trains."""
        return images, labels

    def parameter(self, model: DistributedDataParallel) -> torch.nn.Parameter:
        """The parameter that the fault touches."""
        if self.injection.tensor is None:
            raise ValueError(f"the fault {self.injection.fault.name!r} touches no single tensor")
        inner: torch.nn.Module = model.module
        return inner.get_parameter(self.injection.tensor)


class SkippedAllreduce(Injector):
    """One rank puts its own gradient of one tensor back after the all-reduce of one step."""

    def wrapped(self, model: DistributedDataParallel) -> None:
        """Takes DDP's communication hook on every rank, as a compression scheme would."""
        self._step = -1
        self._target = self.parameter(model)
        model.register_comm_hook(model.process_group, self._reduce)

    def before_step(
        self, step: int, model: DistributedDataParallel, optimizer: torch.optim.Optimizer
    ) -> None:
        """Remembers the step: the hook does not get it."""
        self._step = step

    def _reduce(
        self, group: dist.ProcessGroup, bucket: GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        if self.is_target and self._step == self.injection.step:
            kept = [
                (view, view.clone())
                for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True)
                if parameter is self._target
            ]
        reduced = default_hooks.allreduce_hook(group, bucket)

        def put_back(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            for view, local in kept:
                view.copy_(local)
            return done.value()

        return reduced.then(put_back)


class Bitflip(Injector):
    """One bit of one weight flips on one rank."""

    def before_step(
        self, step: int, model: DistributedDataParallel, optimizer: torch.optim.Optimizer
    ) -> None:
        """Flips it once."""
        if not self.is_target or step != self.injection.step:
            return
        as_integers = self.parameter(model).detach().view(torch.int32).view(-1)
        index = int(torch.randint(len(as_integers), (1,), generator=self.generator))
        bit = int(torch.randint(_LOWEST_BIT, _HIGHEST_BIT + 1, (1,), generator=self.generator))
        as_integers[index] ^= 1 << bit


class HighLearningRate(Injector):
    """The learning rate of all ranks is multiplied."""

    FACTOR = 30.0

    def before_step(
        self, step: int, model: DistributedDataParallel, optimizer: torch.optim.Optimizer
    ) -> None:
        """Multiplies it once."""
        if self.is_target and step == self.injection.step:
            for group in optimizer.param_groups:
                group["lr"] *= self.FACTOR


class MismatchedRate(HighLearningRate):
    """The learning rate of one rank is halved."""

    FACTOR = 0.5


class BadLabels(Injector):
    """The labels of one rank do not belong to its images any more."""

    def batch(
        self, step: int, images: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Deals the batch's labels out anew."""
        if self.is_target and self.injection.step is not None and step >= self.injection.step:
            labels = labels[torch.randperm(len(labels), generator=self.generator)]
        return images, labels


class DeadRank(Injector):
    """One rank is killed."""

    def before_step(
        self, step: int, model: DistributedDataParallel, optimizer: torch.optim.Optimizer
    ) -> None:
        """Kills this very process, without a chance to report."""
        if self.is_target and step == self.injection.step:
            os.kill(os.getpid(), signal.SIGKILL)


class NotANumber(Injector):
    """One batch of one rank has a NaN in it."""

    def batch(
        self, step: int, images: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Spoils one pixel of the batch."""
        if self.is_target and step == self.injection.step:
            images = images.clone()
            images.view(-1)[len(images.view(-1)) // 2] = torch.nan
        return images, labels


class UnsyncedStart(Injector):
    """One rank starts from other weights."""

    def wrapped(self, model: DistributedDataParallel) -> None:
        """Draws this rank's weights again, after DDP broadcast those of rank 0."""
        if not self.is_target:
            return
        with torch.random.fork_rng():
            torch.manual_seed(int(self.generator.initial_seed()) + 1)
            for module in model.module.children():
                if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
                    module.reset_parameters()


INJECTORS: dict[str, type[Injector]] = {
    "none": Injector,
    "skipped-allreduce": SkippedAllreduce,
    "bitflip": Bitflip,
    "high-lr": HighLearningRate,
    "lr-mismatch": MismatchedRate,
    "bad-labels": BadLabels,
    "dead-rank": DeadRank,
    "nan": NotANumber,
    "unsynced-start": UnsyncedStart,
}
