"""A few small gradients of this rank alone, at every step that bears it."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from rankscope.agent.model.facts import held
from rankscope.agent.model.tensors import TensorGroup
from rankscope.agent.probes.base import LONGEST_PIECE, Context, Probe, StepFacts
from rankscope.agent.probes.gradients.local import SKIPPED, is_sharded
from rankscope.agent.probes.norms import SMALL, gathered, tensor_norms, written_out

# What one tensor costs a step, in seconds: a hook, a norm of a small tensor and its reading, with
# caches as a training leaves them; on a device the copy to the host besides, once.
_EACH, _COPY = 12e-6, 100e-6
# More than this report nothing more: what is not finite spreads to all layers before its own.
_MOST = 16
# Steps after which it is asked anew how many the steps bear.
_ANEW = 64


class Canary(Probe):
    """`grad_norm_canary`: norm of up to 16 small tensors of the local gradient, every step.

    What is not finite in the gradient of one rank is in every rank's after the reduction, and in
    every loss a step later: where it came from is known at that step alone, which need not be a
    sampled one. On its way back it gets into all layers before the one that made it; the tensors
    (65,536 elements at most) are spread over the model from its first one on.

    Costs 12 microseconds a tensor and step, on a device 100 more; as many as fit into 30 % of
    `overhead`, so that steps of less than 4 ms have none at the usual one. None in compiled models,
    and where the model is sharded (FSDP). Steps that are sampled in full have `grad_norm_local` in
    its place. Not posted under a loss scaler, for which overflows are ordinary.

    Where several micro-batches make a step it is the norm of all of them side by side. Passes that
    no optimizer steps with, because a loss scaler or the trainer's own question after a finite norm
    skips the step, do not count: where they were not finite on this rank, `gradient.skipped` is an
    event.
    """

    name = "canary"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._group: TensorGroup | None = None
        self._handles: list[Any] = []
        self._count = 0
        self._norms: list[torch.Tensor] = []
        self._seconds = 0.0
        self._next = 0
        self._scaled = self._suited = False
        self._had: set[int] = set()  # ids of the tensors whose gradient is among the norms
        self._guarded = context.guarded(self.name, self._seen)
        context.gradients_not_finite.append(context.guarded(self.name, self._not_finite))

    def after_step(self, facts: StepFacts) -> None:
        """Reports what the hooks have seen; puts on as many as the steps bear."""
        norms, self._norms = self._norms, []
        self._had.clear()
        if norms and not self.context.full and not self._scaled:
            began = time.perf_counter()
            with torch.no_grad():
                facts.scalars["grad_norm_canary"] = torch.linalg.vector_norm(gathered(norms))
            self._seconds += min(time.perf_counter() - began, LONGEST_PIECE)
        self.context.aside += self._seconds
        self._seconds = 0.0
        self._scaled = self._scaled or "amp_scale" in facts.scalars
        if facts.step >= self._next or self.context.parameters is not self._group:
            # As soon as there is a plan.
            self._next = facts.step + (_ANEW if self.context.schedule.is_made else 1)
            self._choose()

    def close(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._count = [], 0

    def _choose(self) -> None:
        group, model = self.context.parameters, self.context.model
        count = 0
        if group is not self._group:
            self._suited = not (self.context.modules.is_compiled() or is_sharded(model))
        if self._suited:
            distant = any(p.device.type != "cpu" for p in group.tensors[:1])
            left = self.context.schedule.at_every_step() - (_COPY if distant else 0.0)
            count = min(max(int(left / _EACH), 0), _MOST)
        if count == self._count and group is self._group:
            return
        self.close()
        self._group, self._count = group, count
        small = [p for p in group.tensors if p.requires_grad and 0 < held(p).numel() <= SMALL]
        # From the first one on, evenly.
        chosen = small[:: max(-(-len(small) // count), 1)] if count else []
        self._handles = [p.register_hook(partial(self._guarded, p)) for p in chosen]

    def _not_finite(self, certain: bool) -> None:
        """Gradients are not finite; `certain`: no optimizer will step with them (a loss scaler)."""
        if certain:
            self._scaled = True
            self._give_up()

    def _give_up(self) -> None:
        """No optimizer has stepped with what was seen so far."""
        norms, self._norms = self._norms, []
        self._had.clear()
        # On a device nothing waits for the answer.
        if not (norms and norms[0].is_cpu) or bool(torch.isfinite(gathered(norms)).all()):
            return
        if self.context.may_tell_skip():
            text = "a gradient of this rank alone is not finite, and no optimizer has stepped"
            data = {"count": len(norms)} | ({"scaler": True} if self._scaled else {})
            self.context.event(self.context.step, SKIPPED, text, data)

    @torch.no_grad()
    def _seen(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """One micro-batch's gradient of one of them."""
        context = self.context
        if context.full or not context.basic:
            return
        began = time.perf_counter()
        if id(parameter) in self._had and parameter.grad is None:
            self._give_up()
        self._had.add(id(parameter))
        values = written_out(gradient)
        if values is not None:
            self._norms += tensor_norms([values])
        self._seconds += min(time.perf_counter() - began, LONGEST_PIECE)
