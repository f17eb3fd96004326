"""Loss and accuracy, recorded without being asked."""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rankscope.agent.probes import loss_sources
from rankscope.agent.probes.base import Context, Probe, StepFacts
from rankscope.agent.probes.classification import Hits

_SCALINGS = ("DivBackward0", "MulBackward0")


# Nobody weighs a loss with more than this; loss scales of mixed precision begin there.
_LARGEST_WEIGHT = 1 / 256

# Losses that are computed and never trained on must not pile up: a node keeps its graph alive.
_MAX_COMPUTED = 4


@dataclass(frozen=True, slots=True)
class _Computed:
    """A loss computed during training, until `backward` tells which one counts.

    Attributes:
        output: held weakly: it is the trainer's.
        node: the graph's node that made it.
        value: a detached copy.
    """

    output: weakref.ref[torch.Tensor]
    node: Any
    value: torch.Tensor
    hits: Hits | None


@dataclass(frozen=True, slots=True)
class _MicroBatch:
    """Loss of one backward pass.

    Attributes:
        value: detached, one element.
        divisor: the number the trainer divided it by before `backward`, as far as it can be read.
        computed: the loss as it was computed, where that is known.
    """

    value: torch.Tensor
    divisor: float
    computed: torch.Tensor | None

    def loss(self, batches: int) -> torch.Tensor:
        """The loss without what accumulation over `batches` or a loss scale did to it.

        A weight that the trainer gave it stays: it is a part of what is minimised.
        """
        accumulated = batches > 1 and self.divisor == batches
        if self.computed is None:
            return self.value * batches if accumulated else self.value
        # A factor that was not read is on the device: only a loss scale is. One that was read and
        # is very large is a loss scale on the host.
        scaled = self.divisor == 1.0 or self.divisor < _LARGEST_WEIGHT
        return self.computed if accumulated or scaled else self.value


class Loss(Probe):
    """`loss`, `accuracy`, `eval/loss`, `eval/accuracy`.

    Costs a microsecond a loss, and for the accuracy a look at the scores (tier `signals`; during
    evaluation always).

    In training the tensor that `backward` starts from is the loss: it is what is minimised. Where
    it is the output of a loss module, or that output divided (accumulation) or scaled (mixed
    precision), the module's own output is taken. A step's loss is the mean over its backward
    passes. In evaluation mode of the root module the outputs of loss modules are averaged until
    training goes on, weighted by their batch sizes.
    """

    name = "loss"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._computed: deque[_Computed] = deque(maxlen=_MAX_COMPUTED)
        self._micro_batches: list[_MicroBatch] = []
        self._hits: list[Hits] = []
        self._evaluation = _Evaluation()
        self._evaluating = False
        self._seconds = 0.0
        self.loss_computed = context.guarded("loss", self._loss_computed)
        self.backward_called = context.guarded("loss", self._backward_called)

    def start(self, facts: StepFacts) -> None:
        """From now on every loss of the process is seen."""
        loss_sources.listen(self)

    def forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Notes whether what follows is training or evaluation."""
        self._evaluating = not module.training
        if not self._evaluating:
            # Losses that were computed and never trained on must not be taken for the next one.
            self._computed.clear()

    def _loss_computed(
        self, judge: Callable[[], Hits | None], args: tuple[Any, ...], output: torch.Tensor
    ) -> None:
        if output.numel() != 1:
            return  # reduction="none": the trainer weighs it further; `backward` will tell
        if self._evaluating:
            size = args[0].shape[0] if args and getattr(args[0], "dim", int)() else 1
            self._evaluation.add(output.detach(), judge(), int(size))
        elif output.requires_grad:
            # A copy of the value: the trainer may change the tensor before or after `backward`.
            value = output.detach().clone()
            self._computed.append(
                _Computed(weakref.ref(output), output.grad_fn, value, self._judged(judge))
            )

    def _judged(self, judge: Callable[[], Hits | None]) -> Hits | None:
        if not self.context.due("signals"):
            return None
        began = time.perf_counter()
        found = judge()
        self._seconds += time.perf_counter() - began
        return found

    def _backward_called(self, root: torch.Tensor) -> None:
        computed = tuple(self._computed)
        self._computed.clear()
        base, divisor = _unscaled(root)
        # The output itself (perhaps changed in place since), or what it was divided or scaled to.
        chosen = next((c for c in computed if c.output() is root or c.node is base), None)
        if chosen is not None:
            whole = root.detach().clone()
            self._micro_batches.append(
                _MicroBatch(chosen.value, 1.0, None)
                if chosen.output() is root
                else _MicroBatch(whole, divisor, chosen.value)
            )
            found = chosen.hits
        else:
            self._micro_batches.append(_MicroBatch(root.detach().clone(), divisor, None))
            found = next((c.hits for c in computed if c.hits is not None), None)
        if found is not None:
            self._hits.append(found)

    def after_step(self, facts: StepFacts) -> None:
        """Means over the micro-batches of the step."""
        self._computed.clear()
        batches, self._micro_batches = self._micro_batches, []
        found, self._hits = self._hits, []
        if batches:
            facts.scalars["loss"] = _mean([b.loss(len(batches)) for b in batches])
        # With a due tier reached in the middle of a step not all its micro-batches were judged.
        if found and len(found) == len(batches):
            facts.scalars["accuracy"] = _ratio(found)
        if self._seconds:
            facts.charge("signals", self._seconds)
            self._seconds = 0.0

    def evaluation(self) -> dict[str, torch.Tensor]:
        """Means over the evaluation phase that has just ended; empty where there was none."""
        ended, self._evaluation = self._evaluation, _Evaluation()
        return ended.means()

    def close(self) -> None:
        """Listens no longer."""
        loss_sources.unlisten(self)


class _Evaluation:
    """Sums over an evaluation phase, kept on the device as two numbers each."""

    def __init__(self) -> None:
        self._loss: torch.Tensor | None = None
        self._samples = 0
        self._hits: Hits | None = None

    def add(self, loss: torch.Tensor, found: Hits | None, size: int) -> None:
        weighted = loss.reshape(()).double() * size
        self._loss = weighted if self._loss is None else self._loss + weighted
        self._samples += size
        if found is not None:
            before = self._hits
            self._hits = (
                found
                if before is None
                else Hits(before.correct + found.correct, before.judged + found.judged)
            )

    def means(self) -> dict[str, torch.Tensor]:
        means = {}
        if self._loss is not None and self._samples:
            means["eval/loss"] = self._loss / self._samples
        if self._hits is not None:
            means["eval/accuracy"] = self._hits.correct / self._hits.judged
        return means


def _unscaled(root: torch.Tensor) -> tuple[Any, float]:
    """The node under divisions and products by plain numbers, and what it was divided by."""
    node: Any = root.grad_fn
    divisor = 1.0
    while node is not None and node.name() in _SCALINGS:
        inputs = [f for f, _ in node.next_functions if f is not None]
        if len(inputs) != 1:
            break
        other = node._saved_other
        # A number in the trainer's source is a tensor on the host; one on the device (a loss scale)
        # is not read: that would wait for the device.
        if other is not None and other.device.type == "cpu":
            factor = float(other)
            if not factor or not math.isfinite(factor):
                break  # a loss that is weighted with nothing is no scaled loss
            divisor *= factor if node.name() == "DivBackward0" else 1.0 / factor
        node = inputs[0]
    return node, divisor


def _mean(values: list[torch.Tensor]) -> torch.Tensor:
    if len(values) == 1:
        return values[0].reshape(())
    return torch.stack([v.reshape(()).double() for v in values]).mean()


def _ratio(found: list[Hits]) -> torch.Tensor:
    correct, judged = found[0].correct, found[0].judged
    for more in found[1:]:
        correct, judged = correct + more.correct, judged + more.judged
    return correct / judged
