"""The size of the numbers that the first layer with weights is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rankscope.agent.model.facts import held
from rankscope.agent.probes.base import Context, Probe, StepFacts, processor_time
from rankscope.agent.probes.modules.module_hook import ModuleHooks
from rankscope.agent.probes.tables import readable
from rankscope.agent.steps.autograd import functorch_level

SERIES = "first_layer_input_rms"
_WEIGHTED = (nn.Linear, nn.modules.conv._ConvNd, nn.RNNBase)
_NORMALISING = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.LocalResponseNorm,
)
# Sampled steps at which it is looked at: how inputs are scaled is written in the code, and does not
# change with what is learned.
_SAMPLES = 8


class FirstLayer(Probe):
    """`first_layer_input_rms`, at the first 8 steps of the tier `full` and no later one.

    Root mean square of the numbers other than 0 that the first linear, convolutional or recurrent
    layer called in a step is given: features that are rarely there (words, one-hot codes) are as
    large as they are where they are. Whatever scales the inputs before it, in the loader or the
    model, has been applied. Only where they carry no gradient, so that nothing that is trained
    (an embedding) has made them, and where the next layer to be called is no normalisation, which
    undoes any scale. Functions (`torch.nn.functional.linear`) and compiled modules are not seen.
    """

    name = "first_layer"
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._hooks = ModuleHooks()
        self._modules: list[nn.Module] = []
        self._samples = 0
        self._calls = 0
        self._given: torch.Tensor | None = None
        self._seconds = 0.0
        self.module_called = context.guarded(self.name, self._module_called)

    def start(self, facts: StepFacts) -> None:
        """Finds the layers."""
        if not self.context.modules.is_compiled():
            kinds = _WEIGHTED + _NORMALISING
            self._modules = [m for m in self.context.model.modules() if isinstance(m, kinds)]

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Puts the hooks in place, in time for the first call of a step."""
        context = self.context
        if self._hooks or not self._modules or self._samples >= _SAMPLES or not context.full:
            return
        if context.trains(module) and not context.modules.is_compiled():
            self._calls, self._given = 0, None
            self._hooks.put_on(self, self._modules)

    def _module_called(self, place: int, module: nn.Module, args: Any, output: Any) -> None:
        self._calls += 1
        if self._calls == 2 and isinstance(module, _NORMALISING):
            self._given = None
        if self._calls > 1 or not isinstance(module, _WEIGHTED) or functorch_level() is not None:
            return
        given = args[0] if isinstance(args, tuple) and args else None
        if not isinstance(given, torch.Tensor) or given.requires_grad or not readable(given):
            return
        if not given.is_floating_point() or not given.numel():
            return
        if not torch.is_grad_enabled():
            return  # a checkpointed block: what it is given may come of trained layers all the same
        began = processor_time()
        with torch.no_grad():
            # Of a shard what this rank holds: to reduce the whole would be a collective.
            values = held(given).detach()
            there = torch.count_nonzero(values).clamp_min(1).float()
            norm = torch.linalg.vector_norm(values, dtype=torch.float32)
            self._given = norm / there.sqrt()
        self._seconds += processor_time() - began

    def after_step(self, facts: StepFacts) -> None:
        """Takes the hooks off and says what they have seen."""
        if not self._hooks:
            return
        facts.charge("full", self._seconds)
        self._seconds = 0.0
        self._samples += 1
        self._hooks.take_off()
        if self._samples >= _SAMPLES:
            self._hooks.remove()
            self._modules = []
        if self._given is not None:
            facts.scalars[SERIES] = self._given
            self._given = None

    def close(self) -> None:
        """Takes the hooks off."""
        self._hooks.remove()
