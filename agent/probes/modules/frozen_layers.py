"""Layers that are frozen as they were initialised, between trained ones or before them."""

from __future__ import annotations

import math
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from rankscope.agent.model.facts import core, held, plain_name
from rankscope.agent.probes.base import Context, Probe, StepFacts, processor_time
from rankscope.agent.probes.modules.module_hook import ModuleHooks
from rankscope.agent.probes.norms import on_one_device
from rankscope.agent.probes.numbers_in_transit import Arrival
from rankscope.agent.probes.tables import readable

EVENT, BASE = "layers.frozen", "layers.untrained"
_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
# Sampled steps before they are looked at: what another optimizer trains in turns has moved by then.
_SAMPLES = 8
# Weights whose largest one says what they were drawn from, and layers and names that are reported.
_FEWEST, _MOST = 64, 64
# Of n numbers drawn evenly up to a limit, the largest is further below it than this over n with a
# chance of e^-20.
_BELOW = 20.0
# Standard errors by which their variance may be off.
_ERRORS = 5.0
# Elements of frozen layers over those that are trained, above which they are what is built upon:
# the base of adapters, which have a fourth of it and less.
_MINORITY = 1.5
# Of more than these, the share of those that are as drawn from which on nobody trained them: what
# attention draws otherwise, embeddings and normalisations are the rest. And how many layers there
# have to be: one random projection may be meant.
_UNTRAINED, _SEVERAL = 1 / 3, 2
# Elements of a layer that are read at the most: they say as much as all of them, and a copy of a
# large head is more than may be left of the device.
_READ = 1 << 20


class FrozenLayers(Probe):
    """The event `layers.frozen` or `layers.untrained`, once: `tensors`, `count`.

    Linear and convolutional layers none of whose parameters requires a gradient, whose weights are
    still what torch initialises them with (drawn evenly up to 1 / sqrt(fan in)), and through which
    gradients pass to what is trained before them: frozen by accident, since what was learned
    elsewhere looks different, and features that are frozen on purpose have nothing trained before
    them. Where frozen layers hold 1.5 times as many numbers as what is trained, or more, they are
    what is built upon: a model that was trained elsewhere, with adapters or a new head. Where more
    than a third of these numbers are as drawn, in two layers or more that the forward pass goes
    through, it was not (`layers.untrained`).

    Tier `full`, at one sampled step; costs a pass over these weights, and nothing where no such
    layer is frozen.
    """

    name = "frozen_layers"
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._core = core(context.model)
        self._hooks = ModuleHooks()
        self._samples = 0
        self._seconds = 0.0
        self._names: list[str] = []
        self._modules: list[nn.Module] = []
        self._drawn: list[torch.Tensor] = []
        self._passed: set[int] = set()
        self._called: set[int] = set()
        self._base, self._frozen = False, 0
        self.module_called = context.guarded(self.name, self._module_called)

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Puts the hooks in place, in time for this call."""
        context = self.context
        if not context.full or self._samples != _SAMPLES or self._hooks:
            return
        if not torch.is_grad_enabled() or not context.trains(self._core):
            return
        if context.modules.is_compiled():
            return
        layers = [
            (name, layer)
            for name, layer in context.modules.named()
            if isinstance(layer, _LAYERS) and _is_frozen(layer)
        ]
        frozen = sum(p.numel() for _, layer in layers for p in layer.parameters())
        trained = sum(p.numel() for p in context.parameters.tensors)
        if not layers:
            return
        self._base = frozen > _MINORITY * trained
        every = self._core.parameters()
        self._frozen = sum(p.numel() for p in every if not p.requires_grad)
        began = processor_time()
        with torch.no_grad():
            drawn = [(name, layer, _is_as_drawn(layer)) for name, layer in layers[:_MOST]]
        known = [(name, layer, flag) for name, layer, flag in drawn if flag is not None]
        self._seconds = processor_time() - began
        self._names = [plain_name(name) for name, _, _ in known]
        self._modules, self._drawn = [m for _, m, _ in known], [flag for _, _, flag in known]
        self._passed, self._called = set(), set()
        self._hooks.put_on(self, self._modules)

    def _module_called(self, place: int, module: nn.Module, args: Any, output: Any) -> None:
        given = args[0] if isinstance(args, tuple) and args else None
        if not (isinstance(given, torch.Tensor) and isinstance(output, torch.Tensor)):
            return
        if torch.is_grad_enabled():
            self._called.add(place)
        # Of what is asked of a teacher, or a target network, no gradient ever comes back.
        if given.requires_grad and output.requires_grad and torch.is_grad_enabled():
            arrived = self.context.guarded(self.name, partial(self._gradient_arrived, place))
            output.register_hook(arrived)

    def _gradient_arrived(self, place: int, gradient: torch.Tensor) -> None:
        self._passed.add(place)

    def after_step(self, facts: StepFacts) -> None:
        """Says what the hooks have seen."""
        if not self.context.full:
            return
        self._samples += 1
        if not self._hooks:
            return
        facts.charge("full", self._seconds)
        with facts.charged("full"):
            self._hooks.remove()
            places = sorted(self._called if self._base else self._passed)
            layers = [
                [
                    f"{self._names[place]}.{key}"
                    for key, parameter in self._modules[place]._parameters.items()
                    if parameter is not None
                ]
                for place in places
            ]
            sizes = [sum(p.numel() for p in self._modules[place].parameters()) for place in places]
            drawn = [self._drawn[place] for place in places]
            self._modules, self._names, self._drawn = [], [], []
            if not drawn:
                return
            arrival = Arrival(torch.stack(on_one_device(drawn)))

            def deliver() -> None:
                there = list(zip(layers, sizes, arrival.result().tolist(), strict=True))
                drawn_ones = [names for names, _, is_drawn in there if is_drawn]
                if self._base:
                    share = sum(size for _, size, is_drawn in there if is_drawn)
                    if len(drawn_ones) < _SEVERAL or share <= _UNTRAINED * self._frozen:
                        return
                self._say(facts.step, list(chain.from_iterable(drawn_ones)))

            facts.when_ready(arrival, deliver)

    def _say(self, step: int, names: list[str]) -> None:
        if names:
            where = "before what is trained" if self._base else "between trained ones"
            text = f"{len(names)} parameters {where} are frozen as initialised: "
            text += ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            data = {"tensors": names[:_MOST], "count": len(names)}
            self.context.event(step, BASE if self._base else EVENT, text, data)

    def close(self) -> None:
        """Takes the hooks off."""
        self._hooks.remove()


def _is_frozen(layer: nn.Module) -> bool:
    own = [p for p in layer._parameters.values() if p is not None]
    return bool(own) and not any(p.requires_grad for p in own)


def _is_as_drawn(layer: nn.Module) -> torch.Tensor | None:
    """Whether weights are torch's own draw: even, up to 1 / sqrt(fan in) (`kaiming_uniform_`).

    Returns:
        A truth of one element where the weights lie; None where it cannot be said.
    """
    weight = layer._parameters.get("weight")
    if weight is None or not readable(weight) or not weight.is_floating_point():
        return None
    # Of a shard what this rank holds: to reduce the whole would be a collective.
    local = held(weight).detach()
    if weight.dim() < 2 or not local.numel():
        return None
    local = local[: max(1, _READ * len(local) // local.numel())]
    count = local.numel()
    if count < _FEWEST:
        return None
    bound = 1 / math.sqrt(weight.numel() / weight.shape[0])
    values = local.float()
    largest, power = values.abs().max(), values.square().mean()
    # The fourth moment of an even draw is 1.8 times its variance squared.
    error = _ERRORS * math.sqrt(0.8 / count)
    rounding = 4 * torch.finfo(weight.dtype).eps
    return (
        (largest >= bound * (1 - _BELOW / count - rounding))
        & (largest <= bound * (1 + rounding))
        & ((3 * power / bound**2 - 1).abs() <= error + rounding)
    )
