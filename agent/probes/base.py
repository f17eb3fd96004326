"""What a probe is, and what it is given to work with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from rankscope.agent.schedule import Schedule
from rankscope.agent.wire import Print


@dataclass(slots=True)
class StepFacts:
    """What the probes say of one step, before it is handed to the sender.

    Attributes:
        scalars: metric name -> value; a tensor of one element is read without waiting for it.
        words: stage -> digest of the whole model.
        prints: fingerprints tensor by tensor.
        tiers: seconds spent on each sampling tier.
    """

    step: int
    scalars: dict[str, float | torch.Tensor] = field(default_factory=dict)
    words: dict[str, int] = field(default_factory=dict)
    prints: list[Print] = field(default_factory=list)
    tiers: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def charged(self, tier: str) -> Iterator[None]:
        """Charges the time of the block to a sampling tier."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.charge(tier, time.perf_counter() - began)

    def charge(self, tier: str, seconds: float) -> None:
        """Charges time to a sampling tier."""
        self.tiers[tier] = self.tiers.get(tier, 0.0) + seconds


@dataclass(slots=True)
class Context:
    """What all probes of a monitor share.

    Attributes:
        names: of the trainable parameters, without the prefixes of wrappers.
        parameters: the same parameters, in the model's order.
        guarded: wraps a callable that the framework calls (a tensor hook, say), so that a fault in
            it disables the probe of that name and nothing else.
        step: the step in progress.
    """

    model: torch.nn.Module
    optimizer: Any
    schedule: Schedule
    names: tuple[str, ...]
    parameters: tuple[torch.nn.Parameter, ...]
    guarded: Callable[[str, Callable[..., Any]], Callable[..., Any]]
    step: int = 0

    def due(self, tier: str) -> bool:
        """Whether a sampling tier is due at the step in progress."""
        return self.schedule.due(tier, self.step)


class Probe:
    """One family of signals, read at the fixed moments of a step; every moment is optional.

    The docstring of a probe states what it costs.
    """

    name: ClassVar[str]

    def __init__(self, context: Context) -> None:
        self.context = context

    def start(self, facts: StepFacts) -> None:
        """At attach: what holds before the first step."""

    def forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """The root module is about to run forward, in training or in evaluation mode."""

    def before_step(self, facts: StepFacts) -> None:
        """The optimizer is about to step (with a closure: before it runs forward)."""

    def after_step(self, facts: StepFacts) -> None:
        """The optimizer has stepped; gradients are still there, as they were applied."""

    def close(self) -> None:
        """Takes back every hook."""
