"""Gradients that are still there when those of the next step are added to them."""

from __future__ import annotations

import time
from typing import Any

import torch

from rankscope.agent.model.facts import core, held
from rankscope.agent.model.tensors import TensorGroup
from rankscope.agent.probes.base import LONGEST_PIECE, Context, Probe, StepFacts
from rankscope.agent.probes.data.given import tensors_in
from rankscope.agent.probes.gradients.tensor_hooks import TensorHooks
from rankscope.agent.probes.modules.module_hook import ModuleHooks
from rankscope.agent.probes.parameters.not_in_optimizer import outside_optimizer
from rankscope.agent.steps.autograd import graph_task

# Parameters at each end of the model, none of them large: a norm of each is taken.
_AT_EACH_END = 2
_MAX_ELEMENTS = 65536


class StaleGradients(Probe):
    """`gradient_carried`: norm of what was in the gradients when the step's own were added.

    It is 0 where gradients are set to zero (or to None) between steps, and no number says as much
    where they are not. Tier `word`; about 5 microseconds for each of four small parameters, and
    where they hold something a norm of them.

    Only of parameters that the optimizer holds: its `zero_grad` reaches no others. Of those that it
    does not hold `gradient_carried_outside` is the same, posted where there are any.

    A hook on the parameter sees its gradient before it is added. Of several passes backward in a
    step (micro-batches, another network's loss that reaches these parameters before they are set
    to zero) the least counts: where gradients are set to zero before any of them, no gradient
    is stale. Under FSDP no such hook fires: there it is what this rank's shards hold when the first
    forward pass begins or, where they hold something then, when each backward pass does, which is
    seen at what the model returns.
    """

    name = "carried"
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._hooked: tuple[Any, ...] = ()
        self._hooks = TensorHooks()
        self._outside: frozenset[int] = frozenset()  # rows that the optimizer does not hold
        self._least: dict[int, torch.Tensor | None] = {}
        self._seconds = 0.0
        # Rows of distributed parameters that the optimizer holds, and hooks that see the model's
        # output where they have gradients already.
        self._held: tuple[tuple[int, torch.Tensor], ...] = ()
        self._calls = ModuleHooks()
        self._root = (core(context.model),)
        self.module_called = context.guarded(self.name, self._module_called)
        self._begins = context.guarded(self.name, self._backward_begins)
        self._empty: bool | None = None  # whether they had no gradient when the model first ran

    def prepare(self, facts: StepFacts) -> None:
        """Puts the hooks in place."""
        if not self.context.word:
            return
        with facts.charged("word"):
            self.close()
            context = self.context
            hooked = (context.parameters, context.optimizer)
            if (
                not self._hooked
                or hooked[0] is not self._hooked[0]
                or hooked[1] is not self._hooked[1]
            ):
                self._hooked = hooked
                self._make_hooks(context.parameters)
            self._least, self._seconds, self._empty = {}, 0.0, None
            self._hooks.put_on()

    def forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Looks whether there are gradients, where no hook will."""
        if not self._held or not self._hooks or not torch.is_grad_enabled():
            return
        if self._empty is None:
            self._empty = all(p.grad is None for _, p in self._held)
        if not (self._empty or self._calls or self.context.modules.is_compiled()):
            self._calls.put_on(self, self._root)

    def _module_called(self, place: int, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or graph_task() != -1:
            return
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._begins)
                return

    def _backward_begins(self, gradient: torch.Tensor) -> None:
        for row, parameter in self._held:
            self.seen(row, parameter)

    def after_step(self, facts: StepFacts) -> None:
        """Takes the hooks off and says what they have seen."""
        if not self._hooks:
            return
        facts.charge("word", self._seconds)
        with facts.charged("word"), torch.no_grad():
            self.close()
            if not self._least:
                # Gradients that are never here are kept elsewhere: that none is shows nothing.
                if self._empty and any(p.grad is not None for _, p in self._held):
                    facts.scalars["gradient_carried"] = 0.0
                return
            least, self._least = self._least, {}
            for name, outside in (("gradient_carried", False), ("gradient_carried_outside", True)):
                seen = [norm for row, norm in least.items() if (row in self._outside) is outside]
                found = [norm for norm in seen if norm is not None]
                if seen:
                    facts.scalars[name] = (
                        torch.linalg.vector_norm(torch.stack(found)) if found else 0.0
                    )

    def close(self) -> None:
        """Takes the hooks off."""
        self._hooks.take_off()
        self._calls.take_off()

    def seen(self, row: int, parameter: torch.Tensor) -> None:
        """A gradient of a parameter is about to be added to what is there."""
        began = time.perf_counter()
        gradient = parameter.grad
        if gradient is None or (row in self._least and self._least[row] is None):
            self._least[row] = None
        else:
            # Of a distributed one what this rank holds: a norm of all of it is a collective.
            local = held(gradient)
            if type(local) is torch.Tensor and local.layout is torch.strided:
                with torch.no_grad():
                    norm = torch.linalg.vector_norm(local, dtype=torch.float32)
                    known = self._least.get(row)
                    self._least[row] = norm if known is None else torch.minimum(known, norm)
        self._seconds += min(time.perf_counter() - began, LONGEST_PIECE)

    def _make_hooks(self, group: TensorGroup) -> None:
        rows = outside_optimizer(group, self.context.optimizer)
        small: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        for row, p in enumerate(group.tensors):
            # Where a framework adds gradients up in memory of its own, `grad` holds nothing.
            if 0 < p.numel() <= _MAX_ELEMENTS and not hasattr(p, "main_grad") and p.is_leaf:
                small[row in rows].append(p)
        chosen = [
            list({id(p): p for p in (*s[:_AT_EACH_END], *s[-_AT_EACH_END:])}.values())
            for s in small
        ]
        inside = len(chosen[0])
        self._held = tuple((i, p) for i, p in enumerate(chosen[0]) if hasattr(p, "_local_tensor"))
        self._outside = frozenset(range(inside, inside + len(chosen[1])))
        self._hooks = TensorHooks(
            (p, self.context.guarded(self.name, _Hook(self, row, p)))
            for row, p in enumerate((*chosen[0], *chosen[1]))
        )


class _Hook:
    """Tensor hook of one parameter."""

    __slots__ = ("_owner", "_parameter", "_row")

    def __init__(self, owner: StaleGradients, row: int, parameter: torch.Tensor) -> None:
        self._owner = owner
        self._row = row
        self._parameter = parameter

    def __call__(self, gradient: torch.Tensor) -> None:
        self._owner.seen(self._row, self._parameter)
