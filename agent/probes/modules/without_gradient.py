"""Modules that are to be trained, and are called where no gradient is recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rankscope.agent.model.facts import core
from rankscope.agent.model.tensors import TensorGroup
from rankscope.agent.probes.base import Context, Probe, StepFacts
from rankscope.agent.probes.modules.module_hook import ModuleHooks

# Sampled steps without a gradient after which a tensor is one that has none so far: experts and
# heads have their turn by then, most of them.
_SAMPLES = 8
# Modules that are looked at: of more the first ones show it.
_MOST = 64


class WithoutGradient(Probe):
    """`tensors_called_without_gradient`.

    The number of tensors that the optimizer is to train, that had no gradient at any sampled step
    yet, and whose module was called in the training pass of the model under `torch.no_grad`, and
    not otherwise: a part of the model that works and is not trained. A head that is not used is
    not called, and one whose output is not used is called with gradients.

    Tier `full`. Costs a look at the gradients of the tensors that never had one, and a hook on
    their modules; nothing where every tensor has had a gradient. Compiled modules have no hooks.
    """

    name = "without_gradient"
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._core = core(context.model)
        self._hooks = ModuleHooks()
        self._of: TensorGroup | None = None
        self._never: set[int] = set()  # ids of the tensors that never had a gradient
        self._samples = 0
        self._modules: list[nn.Module] = []
        self._training = False  # the model is in a pass of training
        self._barred: set[int] = set()
        self._free: set[int] = set()
        self.module_called = context.guarded(self.name, self._module_called)

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Puts the hooks in place, in time for this call."""
        context = self.context
        self._training = torch.is_grad_enabled() and context.trains(self._core)
        if not (self._training and context.full and self._never and self._samples >= _SAMPLES):
            return
        if self._hooks or context.modules.is_compiled():
            return
        with_weights = [
            module
            for _, module in context.modules.named()
            if not self._never.isdisjoint(map(id, module._parameters.values()))
        ][:_MOST]
        if list(map(id, with_weights)) != list(map(id, self._modules)):
            self._modules = with_weights
        self._barred, self._free = set(), set()
        self._hooks.put_on(self, self._modules)

    def _module_called(self, place: int, module: nn.Module, args: Any, output: Any) -> None:
        if self._training:
            (self._free if torch.is_grad_enabled() else self._barred).add(place)

    def after_step(self, facts: StepFacts) -> None:
        """Forgets what has had a gradient; reports what the hooks have seen."""
        if not self.context.full:
            return
        with facts.charged("full"):
            group = self.context.parameters
            if group is not self._of:
                self._of, self._samples = group, 0
                self._never = set(map(id, group.tensors))
            if self._never:
                self._samples += 1
                self._never -= {id(p) for p in group.tensors if p.grad is not None}
            if self._hooks:
                self._hooks.take_off()
                barred = {
                    id(parameter)
                    for place in self._barred - self._free
                    for parameter in self._modules[place]._parameters.values()
                }
                facts.scalars["tensors_called_without_gradient"] = len(barred & self._never)

    def close(self) -> None:
        """Takes the hooks off."""
        self._hooks.remove()
