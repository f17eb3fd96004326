"""How long a step takes and how many samples it moves."""

from __future__ import annotations

import time
from typing import Any

import torch

from rankscope.agent.probes.base import Context, Probe, StepFacts


def batch_size(args: tuple[Any, ...], kwargs: Any) -> int:
    """Samples in a batch: length of the first dimension of the first tensor given to the model."""
    if args and type(args[0]) is torch.Tensor:
        return len(args[0]) if args[0].dim() else 1
    pending = [*args, *(kwargs.values() if isinstance(kwargs, dict) else ())]
    while pending:
        value = pending.pop(0)
        if isinstance(value, torch.Tensor):
            return int(value.shape[0]) if value.dim() else 1
        if isinstance(value, dict):
            pending[:0] = list(value.values())
        elif isinstance(value, list | tuple):
            pending[:0] = list(value)
    return 0


class Timing(Probe):
    """`step_seconds` and `samples_per_second`; costs a clock reading a step.

    A step lasts from the end of the optimizer step before it to its own, so waiting for data and
    for the other ranks is in it. Where steps are left out (tier `basic`), it is the mean since the
    last one. The first step, and the first after an evaluation phase, have no clear beginning.
    """

    name = "timing"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._ended: float | None = None
        self._last = -1
        self._samples = 0

    def forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Counts samples; an evaluation interrupts the clock."""
        if not module.training:
            self._ended = None
        elif torch.is_grad_enabled():
            self._samples += batch_size(args, kwargs)

    def interrupted(self) -> None:
        """Something else than training has taken time."""
        self._ended = None

    def after_step(self, facts: StepFacts) -> None:
        """Closes the step."""
        now = time.perf_counter()
        step = facts.step
        if self._ended is not None:
            seconds = (now - self._ended) / (step - self._last)
            facts.scalars["step_seconds"] = seconds
            if self._samples and seconds > 0:
                facts.scalars["samples_per_second"] = self._samples / seconds
        self._ended = now
        self._last = step
        self._samples = 0
