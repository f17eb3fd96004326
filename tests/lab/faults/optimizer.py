"""3d: optimizer, schedule, control flow."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from tests.lab.faults.case import Expected, register
from tests.lab.faults.models import epoch_steps
from tests.lab.faults.training import Manual, Training


@register
class F33(Training):
    """The optimizer holds other tensors than the model."""

    id = "F33"
    what = "the optimizer is built, then all parameters are replaced, then DDP wraps the model"
    onset = 0

    def wrap(self, net: nn.Module) -> nn.Module:
        self.early = super().make_optimizer(net.parameters())
        for path, module in net.named_modules():
            del path
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.detach().clone()))
        return super().wrap(net)

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        early = getattr(self, "early", None)
        return super().make_optimizer(parameters) if early is None else early

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def expected(self) -> Expected:
        return Expected(kinds=("update.missing",), ranks=self.everybody(), tolerance=1)


@register
class F34(Training):
    """The schedule runs too fast."""

    id = "F34"
    what = "the scheduler advances once a rank at every optimizer step"
    onset = 0

    def prepared(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 400)

    def after_step(self) -> None:
        for _ in range(self.world):
            self.scheduler.step()

    def expected(self) -> Expected:
        return Expected(kinds=("schedule.mismatch",), ranks=self.everybody(), tolerance=1)


@register
class F35(Training):
    """A plateau scheduler that decides by each rank's own validation loss."""

    id = "F35"
    what = "at step 30 one rank's own validation loss makes its scheduler halve the learning rate"
    onset = 30

    def prepared(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            self.optimizer, factor=0.5, patience=0, threshold=0.0
        )

    def before_step(self) -> None:
        if self.step % 10 == 0 and self.step:
            worse = self.is_target and self.step == self.at
            self.scheduler.step(1e3 if worse else 1.0 / self.step)

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.hyperparameters",),
            stages=("hyperparameters",),
            ranks=self.odd_one(),
            step=self.at,
        )


@register
class F37(Training):
    """Gradients are never zeroed."""

    id = "F37"
    what = "from one step on `zero_grad` is not called"
    steps = 80

    def zero_grad(self) -> None:
        if self.step < self.at:
            super().zero_grad()

    def expected(self) -> Expected:
        return Expected(
            kinds=("gradient.accumulating",), ranks=self.everybody(), step=self.at, tolerance=10
        )


@register
class F38(Training):
    """A rank that enters the next epoch before the others."""

    id = "F38"
    what = "one rank's epochs are one batch shorter; all log `epoch`"

    def rows(self, epoch: int) -> Iterator[torch.Tensor]:
        rows = list(super().rows(epoch))
        yield from rows[:-1] if self.is_target else rows

    def after_step(self) -> None:
        self.monitor.log(epoch=self.epoch)

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.progress",), ranks=self.odd_one(), step=epoch_steps(self.world) - 1
        )


@register
class F39(Training):
    """An average of the weights that each rank makes in its own way."""

    id = "F39"
    what = "from one step on the average of the weights moves by each rank's own loss"

    def attached(self) -> None:
        self.ema = copy.deepcopy(self.net)
        self.monitor.watch(self.ema, "ema")
        self.loss = 1.0

    def backward(self, loss: torch.Tensor) -> None:
        self.loss = loss.item()
        super().backward(loss)

    @torch.no_grad()
    def before_step(self) -> None:
        # Of the step before: what is watched is compared when the step is done.
        weight = 0.01 * self.loss if self.step >= self.at else 0.01
        for own, new in zip(self.ema.parameters(), self.net.parameters(), strict=True):
            own.lerp_(new, weight)

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.parameters", "desync.buffers"),
            stages=("watched",),
            ranks=self.all(),
            step=self.at,
        )


# How long a collective waits in such a job: long enough for the agent's thread to be heard often.
HANG_SECONDS = 25.0


class LeftAlone(Manual):
    """A job of its own whose suspect rank leaves the training; the others wait for it in vain."""

    launches = 1
    hangs = True
    settle = 40.0

    def complaint(self, ended: object) -> str:
        """Its ranks do not come to their end, on purpose."""
        return ""

    def wait_forever(self) -> None:
        """Does what a rank does that waits for the others to come where it is."""
        store = dist.distributed_c10d._get_default_store()
        store.wait(["nobody"], timedelta(seconds=HANG_SECONDS))


@register
class F40(LeftAlone):
    """One rank decides alone to stop."""

    id = "F40"
    what = "at one step one rank stops early by its own validation loss; the others wait"

    def before_step(self) -> None:
        if self.is_target and self.step == self.at:
            self.monitor.close()
            self.wait_forever()

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.progress", "rank.stalled", "rank.silent"),
            ranks=self.one(),
            step=self.at,
            tolerance=1,
        )
