"""3b: gradients that are not, or wrongly, combined."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.lab.faults.case import Expected, register
from tests.lab.faults.models import Samples
from tests.lab.faults.sharded import Pipeline, TensorParallel
from tests.lab.faults.training import Manual, Training

_REDUCED = ("reduced_gradient",)
_LOGITS = {"mlp": 10, "cnn": 10, "transformer": 64}
# Two tensors of one shape in each model.
_PAIRS = {
    "mlp": ("inner.bias", "hidden.bias"),
    "cnn": ("bn1.weight", "bn1.bias"),
    "transformer": ("norm1.weight", "norm2.weight"),
}


@register
class F10(Training):
    """The forward goes around DDP."""

    id = "F10"
    what = "the trainer calls `ddp.module(x)`: no gradient is ever reduced"
    onset = 0

    def forward(self, batch: Samples) -> torch.Tensor:
        around = self.model.get_submodule("module")
        loss: torch.Tensor = self.criterion(around(batch[0]), batch[1])
        return loss

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.gradients",), stages=_REDUCED, ranks=self.all(), severity="critical"
        )


@register
class F11(Training):
    """A parameter replaced after wrapping: DDP's hooks stay on the old one."""

    id = "F11"
    what = "one parameter is replaced after DDP has wrapped the model; then the optimizer is built"
    onset = 0
    find_unused = True  # else DDP refuses the second step

    def wrap(self, net: nn.Module) -> nn.Module:
        model = super().wrap(net)
        path, _, name = self.tensor.rpartition(".")
        module = net.get_submodule(path)
        setattr(module, name, nn.Parameter(self.parameter(self.tensor).detach().clone()))
        return model

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.gradients",),
            stages=_REDUCED,
            ranks=self.all(),
            tensors=frozenset({self.tensor}),
        )


@register
class F12(Training):
    """Parameters added after wrapping."""

    id = "F12"
    what = "an adapter is put onto the model after DDP has wrapped it, and given to the optimizer"
    onset = 0

    def wrap(self, net: nn.Module) -> nn.Module:
        model = super().wrap(net)
        size = _LOGITS[self.setting.model]
        net.adapter = self.adapter = nn.Linear(size, size)
        return model

    def forward(self, batch: Samples) -> torch.Tensor:
        logits = self.model(batch[0])
        loss: torch.Tensor = self.criterion(logits + self.adapter(logits), batch[1])
        return loss

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.gradients",),
            stages=_REDUCED,
            ranks=self.all(),
            tensors=frozenset({"adapter.weight", "adapter.bias"}),
        )


@register
class F14(Training):
    """All micro-batches inside `no_sync`."""

    id = "F14"
    what = "from one step on the last micro-batch of two runs under `no_sync`, too"

    def passes(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        with self.model.no_sync():
            self.backward(self.forward(self.next_batch()) / 2)
            if self.step >= self.at:
                self.backward(self.forward(self.next_batch()) / 2)
                return
        self.backward(self.forward(self.next_batch()) / 2)

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.gradients",),
            stages=_REDUCED,
            ranks=self.all(),
            step=self.at,
            severity="critical",
        )


@register
class F15(Manual):
    """Only what the last micro-batch touches is reduced."""

    id = "F15"
    what = "from one step on tensors that only the first of two micro-batches uses are not reduced"

    def build(self) -> nn.Module:
        net = super().build()
        size = _LOGITS[self.setting.model]
        net.aux = self.aux = nn.Linear(size, size)
        return net

    def passes(self) -> None:
        inputs, targets = self.next_batch()
        loss = self.criterion(self.aux(self.model(inputs)), targets)
        self.backward(loss / 2)
        self.backward(self.forward(self.next_batch()) / 2)

    def names(self) -> list[str]:
        names = super().names()
        return names if self.step < self.at else [n for n in names if not n.startswith("aux.")]

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.gradients",),
            stages=_REDUCED,
            ranks=self.all(),
            tensors=frozenset({"aux.weight", "aux.bias"}),
            step=self.at,
        )


@register
class F17(Manual):
    """One rank reduces its tensors in another order."""

    id = "F17"
    what = "one rank reduces two tensors of the same shape in the opposite order"
    onset = 0

    def names(self) -> list[str]:
        names = super().names()
        if self.is_target:
            one, other = (names.index(name) for name in _PAIRS[self.setting.model])
            names[one], names[other] = names[other], names[one]
        return names

    def expected(self) -> Expected:
        return Expected(
            # Swapped tensors are a wrong reduction; the ranks' results differ, too.
            kinds=("reduction.wrong", "desync.gradients"),
            stages=_REDUCED,
            ranks=self.odd_one(),
            tensors=frozenset(_PAIRS[self.setting.model]),
        )


@register
class F18(Manual):
    """A sum instead of a mean."""

    id = "F18"
    what = "from one step on the reduced gradient is not divided by the number of ranks"

    def reduced(self, gradients: dict[str, torch.Tensor]) -> None:
        if self.step >= self.at:
            for gradient in gradients.values():
                gradient *= self.world

    def expected(self) -> Expected:
        return Expected(
            kinds=("reduction.wrong",), stages=_REDUCED, ranks=self.everybody(), step=self.at
        )


@register
class F18b(Manual):
    """Divided twice."""

    id = "F18b"
    what = "the reduced gradient is divided by the number of ranks twice"
    onset = 0

    def reduced(self, gradients: dict[str, torch.Tensor]) -> None:
        for gradient in gradients.values():
            gradient /= self.world

    def expected(self) -> Expected:
        return Expected(kinds=("reduction.wrong",), stages=_REDUCED, ranks=self.everybody())


@register
class F19(Manual):
    """The reduction never leaves pairs of ranks."""

    id = "F19"
    what = "from one step on gradients are reduced inside {0,1} and {2,3} only"
    worlds = (4,)

    def prepared(self) -> None:
        self.pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][self.rank // 2]

    def before_step(self) -> None:
        self.group = self.pair if self.step >= self.at else None

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.gradients",), stages=_REDUCED, ranks=self.all(), step=self.at
        )


@register
class F20(Manual):
    """Buckets are used before their reduction is done."""

    id = "F20"
    what = "from one step on a tenth of one rank's buckets still holds the local gradient"

    def reduced(self, gradients: dict[str, torch.Tensor]) -> None:
        if not self.is_target or self.step < self.at:
            return
        late = random.Random(f"{self.seed}/{self.step}")
        for name, gradient in gradients.items():
            first = self.step == self.at and name == self.tensor
            if late.random() < 0.1 or first:
                gradient.copy_(self.local[name])

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.gradients",), stages=_REDUCED, ranks=self.odd_one(), step=self.at
        )


@register
class F22(TensorParallel):
    """A normalisation that the ranks of a tensor-parallel pair hold both."""

    id = "F22"
    what = "from one step on the gradient of `norm` is not summed over the tensor-parallel pair"

    def sum_shared(self) -> None:
        if self.step < self.at:
            super().sum_shared()

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.gradients",),
            stages=_REDUCED,
            ranks=self.all(),
            tensors=frozenset({"norm.weight", "norm.bias"}),
            step=self.at,
        )


@register
class F23(Pipeline):
    """Tied weights on two stages diverge."""

    id = "F23"
    what = "from one step on the gradient of a tensor tied over two stages is not summed"

    def reduce(self) -> None:
        if self.step < self.at:
            super().reduce()

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.gradients",),
            stages=_REDUCED,
            ranks=self.all(),
            tensors=frozenset({"word_embeddings.weight"}),
            step=self.at,
        )


@register
class F24(Manual):
    """A collective gives zeros to one rank."""

    id = "F24"
    what = "at one step the all-reduce of one tensor gives zeros to one rank"

    def reduced(self, gradients: dict[str, torch.Tensor]) -> None:
        if self.is_target and self.step == self.at:
            gradients[self.tensor].zero_()

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.gradients",),
            stages=_REDUCED,
            ranks=self.odd_one(),
            tensors=frozenset({self.tensor}),
            step=self.at,
        )


@register
class F24b(Manual):
    """A collective drops a tail."""

    id = "F24b"
    what = "from one step on the last 8 elements of one tensor are not reduced on one rank"

    def reduced(self, gradients: dict[str, torch.Tensor]) -> None:
        if self.is_target and self.step >= self.at:
            gradients[self.tensor].view(-1)[-8:] = self.local[self.tensor].view(-1)[-8:]

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.gradients",),
            stages=_REDUCED,
            ranks=self.odd_one(),
            tensors=frozenset({self.tensor}),
            step=self.at,
        )
