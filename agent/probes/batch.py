"""The batch: what this rank trains on in a step."""

from __future__ import annotations

import time
from typing import Any

import torch

from rankscope.agent.fingerprint import FingerprintPlan
from rankscope.agent.model_facts import core, held
from rankscope.agent.probes.arrival import Arrival, Together
from rankscope.agent.probes.base import Context, Probe, StepFacts
from rankscope.agent.probes.given import rows_of, tensors_in
from rankscope.agent.probes.rows import Hashes, RowHashes, packed
from rankscope.agent.probes.tables import readable
from rankscope.agent.tensors import TensorGroup

_STAGE = "batch"
# Odd, so that the micro-batches of a step count in their order.
_TURN = 0x9E3779B97F4A7C15
# Micro-batches whose digests may be under way on a device.
_MAX_WAITING = 256


class Batch(Probe):
    """The word `batch`, which samples are in it, and `samples` and `tokens` of the step.

    Costs one pass over what the root module is given (tier `word`), at the moment it is given:
    a trainer may use the same memory for the next batch. Elsewhere two instructions a forward pass.

    The word covers all tensors in the arguments of the root module, in order; under accumulation
    those of all micro-batches, in order. The words `rows/0` and on tell a few samples of the step
    (`RowHashes`), so that ranks that read the same ones can be found. Samples are the rows of the
    first tensor, tokens the elements of the first one of whole numbers with two dimensions; those
    of all micro-batches together. Passes without gradients do not count, nor do those in evaluation
    mode as long as that is not the mode in which the steps are taken.
    """

    name = "batch"
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._core = core(context.model)
        self._plans = TensorGroup(_STAGE, (), ())
        self._waiting: list[tuple[FingerprintPlan, Any, int]] = []
        self._row_hashes = RowHashes()
        self._rows: list[Hashes | Arrival] = []
        self._seen = 0
        self._word = 0
        self._samples = 0
        self._tokens = 0
        self._seconds = 0.0

    def forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Digests what the model is given."""
        if not self.context.word or not torch.is_grad_enabled():
            return
        if not self.context.trains(self._core):
            return
        began = time.perf_counter()
        given = [t for t in tensors_in(args, kwargs) if readable(t)]
        if given:
            self._seen += 1
            self._count(given)
            if len(self._waiting) < _MAX_WAITING:
                self._digest([held(t) for t in given])
                rows = self._row_hashes.begin(held(given[0]))
                if rows is not None:
                    self._rows.append(rows)
        self._seconds += time.perf_counter() - began

    def after_step(self, facts: StepFacts) -> None:
        """Hands over what the micro-batches of the step were."""
        if not self._seen:
            return
        facts.charge("word", self._seconds)
        waiting, word, rows = self._waiting, self._word, self._rows
        facts.scalars["samples"] = self._samples
        if self._tokens:
            facts.scalars["tokens"] = self._tokens
        self._seen = self._word = self._samples = self._tokens = 0
        self._waiting, self._rows, self._seconds = [], [], 0.0
        if len(waiting) >= _MAX_WAITING:
            return

        def deliver() -> None:
            facts.words[_STAGE] = _combined(word, waiting)
            if rows:
                facts.words |= packed(rows)

        coming = (pending for _, pending, _ in waiting)
        arriving = (r for r in rows if isinstance(r, Arrival))
        facts.when_ready(Together(*coming, *arriving), deliver)

    def _count(self, given: list[torch.Tensor]) -> None:
        first = given[0]
        self._samples += rows_of(first)
        for tensor in given:
            if tensor.dim() == 2 and _is_whole(tensor):
                self._tokens += tensor.numel()
                break

    def _digest(self, tensors: list[torch.Tensor]) -> None:
        if len(self._plans.names) != len(tensors):
            self._plans = TensorGroup(_STAGE, [str(i) for i in range(len(tensors))], ())
        plan = self._plans.plan(tensors)
        # An empty end or padding with zeros is no change of the bits.
        size = sum(t.numel() for t in tensors)
        pending = plan.begin(tensors, sketches=False)
        if pending.ready() and not self._waiting:
            self._word = _combined(self._word, [(plan, pending, size)])
        else:
            self._waiting.append((plan, pending, size))


def _combined(word: int, more: list[tuple[FingerprintPlan, Any, int]]) -> int:
    for plan, pending, size in more:
        word = (word * _TURN + plan.word(pending.result().digests) + size + 1) % 2**64
    return word


def _is_whole(tensor: torch.Tensor) -> bool:
    dtype = tensor.dtype
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
