"""Gradients: the norm as applied, and before the reduction at sampled steps."""

from __future__ import annotations

import time
from typing import Any

import torch

from rankscope.agent.model_facts import held
from rankscope.agent.probes.base import Context, Probe, StepFacts
from rankscope.agent.tensors import TensorGroup

# Where several micro-batches make a step, the local gradient has to be summed up in memory of our
# own; beyond this many elements that is left out.
_MAX_SUMMED = 16 * 2**20


def total_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """L2 norm of all tensors together, float32, on their device (as `nn.utils.get_total_norm`)."""
    norms = torch._foreach_norm(tensors, 2.0, torch.float32)
    norm: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([n.to(norms[0].device) for n in norms])
    )
    return norm


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a gradient; of a sparse one, the stored values."""
    local = held(gradient)
    return local.coalesce().values() if local.is_sparse else local


class Gradients(Probe):
    """`grad_norm`, `grad_norm_local`, and fingerprints of the reduced gradient.

    Costs one pass over the gradients (tier `signals`); two more at sampled steps (tier `full`).

    The applied gradient is read after the optimizer has stepped: that is after the reduction, after
    unscaling and clipping, and right under closures too.

    The local gradient is seen by tensor hooks, which fire for each micro-batch before any wrapper
    reduces it. They are there only during sampled steps, since a Python call for each parameter is
    not free; one norm a parameter then.
    """

    name = "gradients"
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._plans: TensorGroup | None = None
        self._local = _LocalGradient(context)

    def start(self, facts: StepFacts) -> None:
        """Puts the hooks for the first step in place."""
        self._local.arm(facts.step)

    def after_step(self, facts: StepFacts) -> None:
        """Norms and fingerprints of what was applied."""
        context = self.context
        if context.signals:
            group = context.parameters
            with facts.charged("signals"):
                applied = [dense(p.grad) for p in group.tensors if p.grad is not None]
                if applied:
                    facts.scalars["grad_norm"] = total_norm(applied)
            # A gradient that some ranks lack has no fingerprint that could be compared.
            if context.full and len(applied) == len(group.tensors):
                with facts.charged("full"):
                    self._take(facts, group, applied)
        norm, seconds = self._local.disarm()
        if norm is not None:
            facts.scalars["grad_norm_local"] = norm
        if seconds:
            facts.charge("full", seconds)
        self._local.arm(facts.step + 1)

    def _take(
        self, facts: StepFacts, parameters: TensorGroup, gradients: list[torch.Tensor]
    ) -> None:
        # A plan of its own: a gradient may have another dtype than its parameter.
        group = self._plans
        if group is None or group.table != parameters.table:
            group = self._plans = TensorGroup(parameters.table, parameters.names, ())
        pending = group.plan(gradients).begin(gradients, sketches=True)

        def deliver() -> None:
            facts.prints.append(group.prints(facts.step, "reduced_gradient", pending.result()))

        facts.when_ready(pending, deliver)

    def close(self) -> None:
        """Takes the tensor hooks back."""
        self._local.disarm()


class _LocalGradient:
    """Sums up what reaches each parameter during one step, before it is reduced."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._handles: list[Any] = []
        self._norms: dict[int, torch.Tensor] = {}
        self._sums: dict[int, torch.Tensor] = {}
        self._fired: dict[int, int] = {}
        self._micro_batches = 1
        self._seconds = 0.0
        self._small = sum(p.numel() for p in context.parameters.tensors) <= _MAX_SUMMED

    def arm(self, step: int) -> None:
        if self._handles or not self._context.schedule.due("full", step):
            return
        began = time.perf_counter()
        self._norms, self._sums, self._fired, self._seconds = {}, {}, {}, 0.0
        for index, parameter in enumerate(self._context.parameters.tensors):
            if parameter.requires_grad:
                hook = self._context.guarded("gradients", _Seen(self, index))
                self._handles.append(parameter.register_hook(hook))
        self._seconds += time.perf_counter() - began

    def seen(self, index: int, gradient: torch.Tensor) -> None:
        began = time.perf_counter()
        fired = self._fired[index] = self._fired.get(index, 0) + 1
        values = dense(gradient.detach())
        if fired == 1:
            self._norms[index] = torch.linalg.vector_norm(values, dtype=torch.float32)
            if self._micro_batches > 1 and self._small and not gradient.is_sparse:
                self._sums[index] = values.clone()
        elif index in self._sums:
            self._sums[index] += values
        self._seconds += time.perf_counter() - began

    def disarm(self) -> tuple[torch.Tensor | None, float]:
        """Norm of the local gradient (None: not sampled or not known) and the seconds it took."""
        if not self._handles:
            return None, 0.0
        began = time.perf_counter()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        most = max(self._fired.values(), default=0)
        norm = None
        if most == 1:
            norm = torch.linalg.vector_norm(torch.stack(list(self._norms.values())))
        elif most > 1 and len(self._sums) == len(self._fired):
            norm = total_norm(list(self._sums.values()))
        # How many micro-batches to expect next time; a surprise costs one sample.
        self._micro_batches = max(most, 1)
        self._sums, self._norms = {}, {}
        return norm, self._seconds + time.perf_counter() - began


class _Seen:
    """Hook of one parameter."""

    __slots__ = ("_index", "_owner")

    def __init__(self, owner: _LocalGradient, index: int) -> None:
        self._owner = owner
        self._index = index

    def __call__(self, gradient: torch.Tensor) -> None:
        self._owner.seen(self._index, gradient)
