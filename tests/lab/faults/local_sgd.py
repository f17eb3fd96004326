"""3i: local SGD, parameter servers, convergence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from rankscope import agent
from tests.lab.faults.case import Expected, register
from tests.lab.faults.data import BadLabels
from tests.lab.faults.models import batches_of, names_of
from tests.lab.faults.training import Manual, Training, sample_all


class LocalSGD(Training):
    """Every rank trains for itself; every 8 steps the weights are averaged."""

    every: ClassVar[int] = 8

    def wrap(self, net: nn.Module) -> nn.Module:
        """There is no wrapper."""
        return net

    def keeps(self, mean: bool) -> bool:
        """Whether this rank takes the mean as its own."""
        return mean

    @torch.no_grad()
    def after_step(self) -> None:
        """The average."""
        if self.step % self.every != self.every - 1:
            return
        own = list(self.net.parameters())
        flat = torch.cat([p.flatten() for p in own])
        dist.all_reduce(flat)
        flat /= self.world
        if self.keeps(True):
            for parameter, part in zip(own, flat.split([p.numel() for p in own]), strict=True):
                parameter.copy_(part.view_as(parameter))


class MissedAverage:
    """A rank that misses one average; for trainings that ask `keeps`."""

    id = "missed-average"
    what = "at the third average one rank keeps its own weights"
    onset = 23

    def keeps(self: Any, mean: bool) -> bool:
        """Whether this rank goes on with the average."""
        return not (self.is_target and self.step == self.at)

    def expected(self: Any) -> Expected:
        return Expected(
            kinds=("desync.parameters",),
            stages=("parameters", "outside_optimizer"),
            ranks=self.odd_one(),
            step=self.at,
            # It shows from the average on, until the next one.
            tolerance=self.every,
        )


@register
class F80(MissedAverage, LocalSGD):
    """A rank that misses one average."""

    id = "F80"
    what = "local SGD, averaged every 8 steps: at the third average one rank keeps its own weights"


class ParameterServer(Training):
    """Rank 0 has the optimizer; the others push gradients and pull weights."""

    def wrap(self, net: nn.Module) -> nn.Module:
        """There is no wrapper."""
        return net

    def pulls(self) -> bool:
        """Whether this rank takes the newest weights at this step."""
        return True

    def train(self) -> None:
        """Workers have no optimizer to attach to: they say themselves what a step did."""
        self.prepare()
        setting = self.setting
        options: dict[str, Any] = {"overhead": 1.0} if setting.full else {}
        self.monitor = agent.start(
            server=setting.server,
            run=setting.run,
            # Its own: what it is judged by is no other run of the lab that passed before.
            project=setting.run,
            parameters=self.weights(),
            **options,
        )
        sample_all(self.monitor, setting)
        with self.monitor:
            while self.step < self.length:
                self.one_step()
                self.step += 1

    def weights(self) -> dict[str, Any]:
        """As arrays."""
        return {name: p.detach().numpy() for name, p in self.net.named_parameters()}

    def one_step(self) -> None:
        """Push, update on rank 0, pull."""
        self.optimizer.zero_grad()
        loss = self.forward(self.next_batch())
        loss.backward()
        gradients = [p.grad for p in self.net.parameters() if p.grad is not None]
        local = {
            n: p.grad.numpy().copy() for n, p in self.net.named_parameters() if p.grad is not None
        }
        flat = torch.cat([g.flatten() for g in gradients])
        dist.reduce(flat, 0)
        sizes = [g.numel() for g in gradients]
        own = list(self.net.parameters())
        if self.rank == 0:
            for gradient, part in zip(gradients, flat.split(sizes), strict=True):
                gradient.copy_(part.view_as(gradient) / self.world)
            self.optimizer.step()
        with torch.no_grad():
            newest = torch.cat([p.flatten() for p in own])
            dist.broadcast(newest, 0)
            if self.rank and self.pulls():
                for parameter, part in zip(own, newest.split(sizes), strict=True):
                    parameter.copy_(part.view_as(parameter))
        self.monitor.step(loss=loss.item(), parameters=self.weights(), local_gradients=local)


@register
class F81(ParameterServer):
    """A worker that hardly ever pulls."""

    id = "F81"
    what = "from one step on one worker pulls the weights every 50 steps only"
    steps = 80

    @property
    def worker(self) -> int:
        """The suspect one: never the server itself."""
        return max(self.suspects, 1)

    def pulls(self) -> bool:
        late = self.rank == self.worker and self.step >= self.at
        return not late or (self.step - self.at) % 50 == 49

    def expected(self) -> Expected:
        both = (frozenset({0, 1}),) if self.world == 2 else ()
        return Expected(
            kinds=("desync.parameters", "desync.progress"),
            ranks=(frozenset({self.worker}), *both),
            step=self.at,
        )


# Measured: at ten times the rate that these two begin with they learn faster, and end at a tenth of
# the loss. The transformer has no such rate: at 0.5 its loss jumps once and falls on to less than
# before (2.2 of 2.7 after 180 steps, 6 runs of 6), at 1 and 2 it ends with NaN.
_TOO_HIGH = {"mlp": 1.5, "cnn": 1.5}


@register
class F82(Training):
    """A learning rate above the stability limit."""

    id = "F82"
    what = "from one step on the learning rate is higher than gradient descent can bear"
    models = ("mlp", "cnn")
    steps = 200
    onset = 80
    lr = 0.05

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr)

    def before_step(self) -> None:
        if self.step == self.at:
            self.optimizer.param_groups[0]["lr"] = _TOO_HIGH[self.setting.model]

    def expected(self) -> Expected:
        return Expected(
            kinds=(
                "loss.oscillating",
                "gradient.oscillating",
                "lr.too_high",
                "loss.diverging",
                "loss.spike",
            ),
            ranks=self.everybody(),
            step=self.at,
            tolerance=50,
        )


@register
class F83(Training):
    """The loss repeats with the data."""

    id = "F83"
    what = "the data are sorted by label and never shuffled"
    steps = 200
    onset = 0

    def rows(self, epoch: int) -> Iterator[torch.Tensor]:
        order = self.training_set[1].argsort(stable=True)
        yield from batches_of(order, rank=self.rank, world=self.world)

    def expected(self) -> Expected:
        return Expected(
            kinds=("loss.oscillating", "data.unshuffled"), ranks=self.everybody(), tolerance=64
        )


@register
class F84(Manual):
    """Layers that stop moving."""

    id = "F84"
    what = "from one step on everything but `head` is frozen"
    steps = 80

    def before_step(self) -> None:
        if self.step == self.at:
            for name, parameter in self.net.named_parameters():
                parameter.requires_grad_(name.startswith("head."))

    def zero_grad(self) -> None:
        self.net.zero_grad()

    def expected(self) -> Expected:
        frozen = [n for n in names_of(self.setting.model) if not n.startswith("head.")]
        return Expected(
            kinds=("layer.dead", "update.missing"),
            ranks=self.everybody(),
            tensors=frozenset(frozen),
            step=self.at,
            tolerance=8,
        )


@register
class F84b(Training):
    """Layers that no gradient reaches."""

    id = "F84b"
    what = "from one step on what goes into `head` is detached: all layers before it stand still"
    steps = 80

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05)

    def prepared(self) -> None:
        self.net.get_submodule("head").register_forward_pre_hook(self._cut)

    def _cut(self, module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        # Times zero and not detached: DDP waits for every gradient.
        (x,) = args
        return (x.detach() + 0 * x,) if self.step >= self.at else (x,)

    def expected(self) -> Expected:
        still = [n for n in names_of(self.setting.model) if not n.startswith("head.")]
        return Expected(
            kinds=("layer.dead", "update.missing"),
            ranks=self.everybody(),
            tensors=frozenset(still),
            step=self.at,
            tolerance=8,
        )


@register
class F85(BadLabels):
    """What rank 0 logs hides the others."""

    id = "F85"
    what = "one rank other than 0 has bad labels; only rank 0 logs its loss"
    worlds = (4,)

    @property
    def suspects(self) -> int:
        return 1 + super().suspects % 3

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss = super().forward(batch)
        if self.rank == 0:
            self.monitor.log(train_loss=loss)
        return loss
