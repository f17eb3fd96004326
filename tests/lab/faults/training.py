"""The healthy trainers that the cases break: one rank of a data-parallel job.

A case overrides the one method that its fault is in. Without a change, `Training` is a plain DDP
trainer and `Manual` one that reduces its gradients itself, as Horovod's users do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankscope import agent
from tests.lab.faults.case import Case, Setting
from tests.lab.faults.models import Samples, batches_of, build, data_of, order_of

# Steps after which it is over in any case.
_LONGEST = 1024


class Training(Case):
    """DDP, AdamW, one batch a step.

    Attributes:
        lr: learning rate.
        broadcast_buffers: as DDP's.
    """

    lr: ClassVar[float] = 2e-3
    broadcast_buffers: ClassVar[bool] = True
    find_unused: ClassVar[bool] = False
    dropout: ClassVar[float] = 0.0

    step: int
    net: nn.Module
    model: nn.Module
    optimizer: torch.optim.Optimizer
    monitor: Any
    sampled: bool

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.criterion = nn.CrossEntropyLoss()
        self.step = 0
        self.epoch = 0

    # ------------------------------------------------------------------------- what is overridden

    def first_seed(self) -> int:
        """Seed with which the weights are drawn: the same on all ranks."""
        return 1000 + self.seed

    def own_seed(self) -> int:
        """Seed of everything after that: each rank's own."""
        return 1_000_000 + 1000 * self.seed + self.rank

    def build(self) -> nn.Module:
        """The user's model."""
        return build(self.setting.model, self.dropout)

    def wrap(self, net: nn.Module) -> nn.Module:
        """Makes it data-parallel."""
        options: dict[str, Any] = {} if self.broadcast_buffers else {"broadcast_buffers": False}
        return DistributedDataParallel(net, find_unused_parameters=self.find_unused, **options)

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """After wrapping."""
        return torch.optim.AdamW(parameters, lr=self.lr)

    def trained(self) -> Iterable[nn.Parameter]:
        """What the optimizer is given."""
        return self.model.parameters()

    def prepared(self) -> None:
        """Wrapped, optimizer built, not yet attached."""

    def attached(self) -> None:
        """Attached, not a step taken."""

    def rows(self, epoch: int) -> Iterator[torch.Tensor]:
        """The batches of an epoch, as rows of the training set."""
        order = order_of(epoch, seed=self.seed)
        part, parts = self.share()
        yield from batches_of(order, rank=part, world=parts)

    def batch(self, inputs: torch.Tensor, targets: torch.Tensor) -> Samples:
        """The batch as the model gets it."""
        return inputs, targets

    def before_step(self) -> None:
        """A step begins."""

    def forward(self, batch: Samples) -> torch.Tensor:
        """The loss of a batch."""
        loss: torch.Tensor = self.criterion(self.model(batch[0]), batch[1])
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        """The gradients of a loss."""
        loss.backward()

    def passes(self) -> None:
        """Everything between zeroed gradients and reduced ones."""
        self.backward(self.forward(self.next_batch()))

    def zero_grad(self) -> None:
        """Begins afresh."""
        self.optimizer.zero_grad()

    def reduce(self) -> None:
        """Makes the gradients those of all ranks; DDP has done it."""

    def clip(self) -> None:
        """Between reduction and step."""

    def apply(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()

    def after_step(self) -> None:
        """A step is done."""

    # ---------------------------------------------------------------------------------- the trainer

    def attach(self, **options: Any) -> Any:
        """The line that every user's trainer has."""
        setting = self.setting
        monitor = agent.attach(
            self.model,
            self.optimizer,
            **{
                "server": setting.server,
                "run": setting.run,
                # Its own: what it is judged by is no other run of the lab that passed before.
                "project": setting.run,
                **({"overhead": 1.0} if setting.full else {}),
                **options,
            },
        )
        sample_all(monitor, setting)
        return monitor

    def share(self) -> tuple[int, int]:
        """Which part of the data this rank reads, of how many."""
        return self.rank, self.world

    def prepare(self) -> None:
        """Everything before the first step."""
        self.training_set, self.test_set = data_of(self.setting.model)
        torch.manual_seed(self.first_seed())
        self.net = self.build()
        self.model = self.wrap(self.net)
        self.optimizer = self.make_optimizer(self.trained())
        self.prepared()
        torch.manual_seed(self.own_seed())
        self._source = self._endless()

    def train(self) -> None:
        """One rank from its first step to its last."""
        self.prepare()
        self.monitor = self.attach()
        with self.monitor:
            self.attached()
            last = self.length
            while self.step < last:
                # What was planned: by the end of the step the agent may have planned anew.
                self.sampled = bool(self.monitor._context.state)
                self.one_step()
                self.step += 1
                if self.length <= self.step == last:
                    last = max(last, self.next_sample())

    def next_sample(self) -> int:
        """One more than the next step at which all ranks sample everything.

        They choose their intervals by what a sample has cost them: on a busy machine one of them
        may sample every 512th step while the others do every 32nd. And it may choose anew before it
        gets
        there: then there is another one.
        """
        if self.setting.full or self.step >= _LONGEST:
            return self.step
        sampled = self.step > self.length and self.sampled
        extremes = torch.tensor([1 << max(self.monitor._schedule.exponents.values()), not sampled])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        interval, missing = extremes.tolist()
        return self.step + (-self.step % interval + 1 if missing else 0)

    def one_step(self) -> None:
        """One optimizer step."""
        self.before_step()
        self.zero_grad()
        self.passes()
        self.reduce()
        self.clip()
        self.apply()
        self.after_step()

    def next_batch(self) -> Samples:
        """The next batch of this rank."""
        inputs, targets = self.training_set
        rows = next(self._source)
        return self.batch(inputs[rows], targets[rows])

    def parameter(self, name: str) -> nn.Parameter:
        """One of the model's."""
        return self.net.get_parameter(name)

    @torch.no_grad()
    def evaluate(self, samples: Samples) -> float:
        """Accuracy in evaluation mode; the agent sees loss and accuracy."""
        self.model.eval()
        logits = self.net(samples[0])
        self.criterion(logits, samples[1])
        self.model.train()
        return float((logits.argmax(1) == samples[1]).float().mean())

    def _endless(self) -> Iterator[torch.Tensor]:
        while True:
            yield from self.rows(self.epoch)
            self.epoch += 1


class Manual(Training):
    """Ranks that reduce their gradients themselves: `all_reduce(SUM)`, then `/ N`."""

    def wrap(self, net: nn.Module) -> nn.Module:
        """There is no wrapper."""
        return net

    group: Any = None

    def names(self) -> list[str]:
        """Order in which tensors are reduced."""
        return [name for name, p in self.net.named_parameters() if p.requires_grad]

    def reduce(self) -> None:
        """One collective for all tensors, in their order."""
        held = [(name, self.parameter(name)) for name in self.names()]
        for _, parameter in held:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = {name: p.grad for name, p in held if p.grad is not None}
        self.local = {name: gradient.clone() for name, gradient in gradients.items()}
        flat = torch.cat([gradient.flatten().float() for gradient in gradients.values()])
        dist.all_reduce(flat, group=self.group)
        flat /= dist.get_world_size(self.group)
        for gradient, part in zip(
            gradients.values(), flat.split([g.numel() for g in gradients.values()]), strict=True
        ):
            gradient.copy_(part.view_as(gradient))
        self.reduced(gradients)

    def reduced(self, gradients: dict[str, torch.Tensor]) -> None:
        """The means are there; `local` holds what went into them."""


def sample_all(monitor: Any, setting: Setting) -> None:
    """With full sampling, everything is sampled at every step.

    The largest `overhead` alone does not do it: a tier that takes more than 0.45 % of the step is
    never due at each. The server asks for it in the same way with a dense-sampling request.
    """
    if setting.full:
        monitor._schedule.ask_dense(10**9)
