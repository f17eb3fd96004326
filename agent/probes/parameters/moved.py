"""Parameters that move while no optimizer steps: what a parameter server sends, updates by hand."""

from __future__ import annotations

from typing import Any

import torch

from rankscope.agent.fingerprint.plan import FingerprintPlan, Pending
from rankscope.agent.probes.base import Context, Probe, StepFacts, processor_time

EVENT = "parameters.moved"
# Forward passes before which the parameters are read: the second, and four times as many each time.
_FIRST, _TIMES = 2, 4
# Readings that differ from the one before: a checkpoint that is loaded after `attach` makes one.
_MOVES = 2


class MovedWithoutStep(Probe):
    """The event `parameters.moved`: no step has ended, and the parameters are trained all the same.

    Takes the digest of the parameters before the 1st, 2nd, 8th, 32nd, ... forward pass with
    gradients until the first step of the run begins: nothing in a loop that steps.
    """

    name = "moved"
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._over = False
        self._forwards = 0
        self._due = 1
        self._moves = 0
        self._last: int | None = None
        self._pending: tuple[FingerprintPlan, Pending] | None = None

    def forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Reads the parameters where it is due."""
        if self._over or not torch.is_grad_enabled():
            return
        self._compare()
        self._forwards += 1
        if self._forwards != self._due:
            return
        self._due = _FIRST if self._due == 1 else self._due * _TIMES
        group = self.context.parameters
        began = processor_time()
        tensors = group.held()
        plan = group.plan(tensors)
        self._pending = plan, plan.begin(tensors, sketches=False)
        self.context.aside += processor_time() - began
        self._compare()

    def before_step(self, facts: StepFacts) -> None:
        """An optimizer steps: what its closure computes is of other parameters each time."""
        self._over, self._pending = True, None

    def after_step(self, facts: StepFacts) -> None:
        """A step has ended, even where its beginning was not seen: the optimizer trains."""
        self._over, self._pending = True, None

    def _compare(self) -> None:
        if self._pending is None or not self._pending[1].ready():
            return
        plan, pending = self._pending
        self._pending = None
        digest = plan.model_digest(pending.result().digests)
        self._moves += self._last is not None and digest != self._last
        self._last = digest
        if self._moves == _MOVES:
            self._over = True
            text = "no optimizer has stepped, and the parameters change all the same"
            self.context.event(self.context.step, EVENT, text, {})
