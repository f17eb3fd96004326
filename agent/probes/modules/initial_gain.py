"""How large the weights are that a training begins with."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from rankscope.agent.model.facts import held
from rankscope.agent.probes.base import Context, Probe, StepFacts, processor_time
from rankscope.agent.probes.norms import on_one_device
from rankscope.agent.probes.tables import readable

SERIES = "initial_gain"
_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
# Layers that are looked at, and how many there have to be: of a single one any size may be meant.
_MOST, _FEWEST = 64, 2


class InitialGain(Probe):
    """`initial_gain`, at the first sampled step alone.

    Median, over the linear and convolutional layers that are trained, of the root mean square of
    their weights times the root of what goes into each of their outputs (fan in): so many times an
    input of size 1 comes out larger. torch's own initialisation has 0.58, Kaiming's 1.41, Xavier's
    and an orthogonal one about 1. Not of weights that an embedding shares, which has a scale of its
    own, nor of layers that begin at zero (the second one of an adapter does) unless all of them do,
    nor in a run that goes on from an earlier one; of sharded weights those that the rank
    holds. Scales that are applied to the weights in the forward pass (equalised learning rates) are
    not seen. Tier `full`; costs a pass over up to 64 layers' weights.
    """

    name = "initial_gain"
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._gain: torch.Tensor | None = None
        self._read = False
        self._seconds = 0.0

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Reads the weights before the first step changes them."""
        if self._read or not self.context.full or not self.context.trains(module):
            return
        self._read = True
        if self.context.step > 0:
            return  # resumed: what is there has been trained
        began = processor_time()
        named = self.context.modules.named()
        shared = {id(m.weight) for _, m in named if isinstance(m, nn.Embedding)}
        layers = [m for _, m in named if isinstance(m, _LAYERS) and id(m.weight) not in shared]
        with torch.no_grad():
            gains = [gain for m in layers[:_MOST] if (gain := _gain(m.weight)) is not None]
            if len(gains) >= _FEWEST:
                found = torch.stack(on_one_device(gains))
                # No selection by a mask: how many there are would have to be waited for.
                others = found.masked_fill(found == 0, math.nan).nanmedian()
                median = torch.where((found == 0).all(), 0.0, others)
                # Of weights that are no numbers the size is none either.
                self._gain = torch.where(found.isnan().any(), math.nan, median)
        self._seconds = processor_time() - began

    def after_step(self, facts: StepFacts) -> None:
        """Says what was read."""
        if self._gain is not None:
            facts.charge("full", self._seconds)
            facts.scalars[SERIES] = self._gain
            self._gain = None


def _gain(weight: Any) -> torch.Tensor | None:
    """The gain of a layer that is trained; None where its weights cannot be read."""
    if not isinstance(weight, nn.Parameter) or not weight.requires_grad or not readable(weight):
        return None
    # Of a shard what this rank holds: to reduce the whole would be a collective.
    local = held(weight).detach()
    if weight.dim() < 2 or not weight.is_floating_point() or not local.numel():
        return None
    fan_in = weight.numel() / weight.shape[0]
    # No copy in float32: a large head would double there.
    norm: torch.Tensor = torch.linalg.vector_norm(local, dtype=torch.float32)
    return norm * math.sqrt(fan_in / local.numel())
