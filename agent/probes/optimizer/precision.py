"""The precision that autocast computes the forward pass in."""

from __future__ import annotations

from typing import Any

import torch

from rankscope.agent.probes.base import Context, Probe, StepFacts


class Precision(Probe):
    """`autocast`: bits of the significand that autocast computes with, 0 where it is off.

    8 for bfloat16 and 11 for float16, as the last forward pass with gradients began at a sampled
    step; costs one question to torch a pass. Autocast that begins inside the model is not seen.
    """

    name = "precision"
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._bits: float | None = None

    def forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Asks what holds where the pass begins."""
        if not torch.is_grad_enabled() or not self.context.parameters.tensors:
            return
        device = self.context.parameters.tensors[0].device.type
        if not torch.amp.is_autocast_available(device):
            return  # as of the device `meta`, before the model is moved
        self._bits = 0.0
        if torch.is_autocast_enabled(device):
            self._bits = _significand(torch.get_autocast_dtype(device))

    def after_step(self, facts: StepFacts) -> None:
        """Posts it."""
        if self._bits is not None and self.context.signals:
            facts.scalars["autocast"] = self._bits
        self._bits = None


def _significand(dtype: torch.dtype) -> float:
    """Bits, the leading one included."""
    bits, epsilon = 1, torch.finfo(dtype).eps
    while epsilon < 1.0:
        bits, epsilon = bits + 1, epsilon * 2
    return float(bits)
