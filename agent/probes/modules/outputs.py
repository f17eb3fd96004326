"""What the model gives back for the samples of a batch: whether it is alike for all of them."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import nn

from rankscope.agent.model.facts import core
from rankscope.agent.probes.base import LONGEST_PIECE, Context, Probe, StepFacts, processor_time
from rankscope.agent.probes.data.given import tensors_in
from rankscope.agent.probes.modules.module_hook import ModuleHooks
from rankscope.agent.probes.norms import SMALL
from rankscope.agent.probes.tables import readable
from rankscope.agent.steps.autograd import functorch_level, graph_task

# Samples of an output whose directions are compared, and numbers of each of them: the mean of 64
# random directions has a squared length of 1/64, an error of the spread of less than 2 %.
_SAMPLES, _NUMBERS = 64, 256
_GOLDEN = (math.sqrt(5) - 1) / 2
# Numbers of a sample of which its reconstruction is one.
_LEAST = 8
# Rows of an output from which on its halves are looked at.
_LEAST_ROWS = 16
# Outputs of one step that are compared: of more micro-batches the first ones show it.
_MOST = 16


class Outputs(Probe):
    """`output_spread` of the model's vectors, `outputs_compared`, `output_halves`; reconstructions.

    Tier `full`: an operation over 64 vectors of up to 256 numbers for each output of a sampled
    step. At other steps nothing is hooked.

    `output_spread` is 1 minus the squared length of the mean direction of all vectors that the
    model has returned in the step: 1 where they point anywhere, 0 where all point the same way, so
    that the output says nothing of the sample. The vectors are the rows of tensors of floating
    point numbers with two dimensions that carry a gradient; of several shapes, those of which there
    are most: `outputs_compared` is their number. Of a single one of 16 rows or more,
    `output_halves` is how far a row of its first half lies from the same one of its second half
    (1 minus the mean cosine of up to 64 such pairs), over how far any two of these rows do: 1 where
    rows have nothing to do with each other, near 0 where the halves are two views of the same
    samples. A model that returns none (its loss is
    computed inside) is represented by the last module with weights that was called in each pass.

    `reconstruction_spread` is the same of outputs that have the shape of the first tensor of
    floating point numbers that the model is given, whatever its dimensions: of 8 numbers a sample
    and two samples or more, from all over them: at their edges pictures are often alike. Where
    their sizes differ, of those like the first one of the step.

    Compiled modules have no hooks and are not seen.
    """

    name = "outputs"
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._core = core(context.model)
        self._hooks = ModuleHooks()
        self._modules: list[nn.Module] = []
        self._found: dict[tuple[int, ...], list[torch.Tensor]] = {}
        self._halves: torch.Tensor | None = None
        # Of a model that returned no vectors at the last sampled step: its modules with weights,
        # and the one of them that was called last.
        self._inner: list[nn.Module] = []
        self._last: nn.Module | None = None
        self._seconds = 0.0
        # Of the model's input, and the directions of outputs of that shape.
        self._given: tuple[int, ...] = ()
        self._rebuilt: list[torch.Tensor] = []
        # Held by the hooks weakly and called through them.
        self.module_called = context.guarded(self.name, self._module_called)

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Puts the hooks in place, in time for this call."""
        if self.context.full:
            self._given = next(
                (
                    tuple(t.shape)
                    for t in tensors_in(args, kwargs)
                    if readable(t) and t.is_floating_point()
                ),
                (),
            )
        if self._hooks or not self.context.full or not self.context.trains(self._core):
            return
        began = processor_time()
        if not self.context.modules.is_compiled():
            inner = self._inner if self._last is None else [self._last]
            wanted = [self._core, *inner]
            if list(map(id, wanted)) != list(map(id, self._modules)):
                self._modules = wanted
            self._found = {}
            self._halves = None
            self._hooks.put_on(self, self._modules)
        self._seconds = processor_time() - began

    def _weighted(self) -> list[nn.Module]:
        """Modules with weights of their own and no other module inside."""
        return [
            module
            for _, module in self.context.modules.named()
            if module is not self._core and module._parameters and not module._modules
        ]

    def _module_called(self, place: int, module: nn.Module, args: Any, output: Any) -> None:
        if not (torch.is_grad_enabled() and self.context.trains(self._core)):
            return
        if graph_task() != -1 or functorch_level() is not None:
            return  # activation checkpointing runs it once more; a transformation stands for others
        if place and module is not self._last:
            self._last = module  # until another one is called
            return
        for tensor in tensors_in(output):
            rebuilt = not place and _is_rebuilt(tensor, self._given)
            if not (rebuilt or _is_of_vectors(tensor)):
                continue
            is_large = tensor.numel() > SMALL
            clock = processor_time if is_large else time.perf_counter
            began = clock()
            if rebuilt and len(self._rebuilt) < _MOST:
                directions = _directions(_from_all_over(tensor))
                if not self._rebuilt or directions.shape[1] == self._rebuilt[0].shape[1]:
                    self._rebuilt.append(directions)
            if _is_of_vectors(tensor):
                known = self._found.setdefault(tuple(tensor.shape[1:]), [])
                if len(known) < _MOST:
                    known.append(_directions(tensor))
                if self._halves is None and len(tensor) >= _LEAST_ROWS and len(tensor) % 2 == 0:
                    self._halves = _halves(tensor)
            spent = clock() - began
            self._seconds += spent if is_large else min(spent, LONGEST_PIECE)

    def after_step(self, facts: StepFacts) -> None:
        """Takes the hooks off and reports what they have seen."""
        if not self._hooks:
            return
        facts.charge("full", self._seconds)
        with facts.charged("full"), torch.no_grad():
            self._hooks.take_off()
            found, self._found = self._found, {}
            halves, self._halves = self._halves, None
            rebuilt, self._rebuilt = self._rebuilt, []
            if rebuilt and len({one.device for one in rebuilt}) == 1:
                spread = 1 - torch.cat(rebuilt).mean(0).square().sum()
                facts.scalars["reconstruction_spread"] = spread
            if not found and not self._inner:
                self._inner = self._weighted()
            most = max(found.values(), key=len, default=[])
            if not most or len({one.device for one in most}) > 1:
                return
            together = torch.cat(most)
            if len(together) > 1:
                facts.scalars["output_spread"] = 1 - together.mean(0).square().sum()
                facts.scalars["outputs_compared"] = len(most)
                if halves is not None and sum(map(len, found.values())) == 1:
                    facts.scalars["output_halves"] = halves

    def close(self) -> None:
        """Takes the hooks off."""
        self._hooks.remove()


def _is_of_vectors(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and readable(tensor)
        and tensor.layout is torch.strided
        and tensor.dim() == 2
        and tensor.shape[0] > 0
        and tensor.shape[1] > 1
        and tensor.is_floating_point()
        and tensor.requires_grad
    )


def _is_rebuilt(tensor: torch.Tensor, given: tuple[int, ...]) -> bool:
    return (
        type(tensor) is torch.Tensor
        and readable(tensor)
        and tensor.layout is torch.strided
        and tensor.dim() > 1
        and tuple(tensor.shape) == given
        and tensor.shape[0] > 1
        and tensor.numel() >= _LEAST * tensor.shape[0]
        and tensor.is_floating_point()
        and tensor.requires_grad
    )


def _from_all_over(tensor: torch.Tensor) -> torch.Tensor:
    """Up to 256 numbers of each of the first samples, the same ones of each: [samples, numbers]."""
    some = tensor.detach()[:_SAMPLES]
    numbers = math.prod(some.shape[1:])
    if numbers <= _NUMBERS:
        return some.flatten(1)
    # Steps of the golden section fall on no row or column more often than on the others.
    stride = int(numbers * _GOLDEN)
    while math.gcd(stride, numbers) > 1:
        stride += 1
    # Computed where the tensor is: nothing is sent there, and nothing waited for.
    at = torch.arange(_NUMBERS, device=some.device) * stride % numbers
    places: list[Any] = []
    for size in reversed(some.shape[1:]):
        places.append(at % size)
        at = at // size
    every: Any = slice(None)
    return some[(every, *reversed(places))]


def _halves(tensor: torch.Tensor) -> torch.Tensor:
    """How far rows lie from those that are half of them further, over how far any two do."""
    rows = len(tensor) // 2
    one, other = _directions(tensor[:rows]), _directions(tensor[rows:])
    apart = 1 - (one * other).sum(1).mean()
    spread = 1 - ((one.mean(0) + other.mean(0)) / 2).square().sum()
    return apart / spread.clamp_min(1e-12)


def _directions(tensor: torch.Tensor) -> torch.Tensor:
    """The first rows, each of length 1; what is 0 stays so."""
    with torch.no_grad():
        some = tensor.detach()[:_SAMPLES, :_NUMBERS]
        if some.dtype is not torch.float64:
            some = some.float()
        return torch.nn.functional.normalize(some, dim=1)
