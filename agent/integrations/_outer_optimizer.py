"""Outer optimizers: none of torch's, with one of torch's inside (DeepSpeed, Megatron-core)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from rankscope.agent import attach as attach_to
from rankscope.agent.steps.torch_monitor import TorchMonitor


class Outer:
    """What moves a model's parameters, as `attach` wants it.

    The optimizer inside holds copies of them in float32, or flat parts of all of them: its rates
    are those of the model, its tensors are not.

    Args:
        optimizer: with `param_groups`.
        model: whose parameters it moves.
    """

    def __init__(self, optimizer: Any, model: torch.nn.Module) -> None:
        self.state: dict[Any, Any] = {}
        # In no attribute: whatever is found in one is taken for wrapped, and its state compared.
        self._given: Callable[[], list[dict[str, Any]]] = lambda: optimizer.param_groups
        self._parameters = list(model.parameters())

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's, with the model's parameters in the first of them."""
        groups = [{**group, "params": []} for group in self._given()]
        groups[0]["params"] = self._parameters
        return groups


def attach_outside(
    model: torch.nn.Module,
    optimizer: Any,
    norm_of: Callable[[Any], float | None],
    **options: Any,
) -> Any:
    """As `agent.attach`, and reports the optimizer's steps from end to end.

    The torch optimizer inside it has stepped before it copies (from a master copy in float32) or
    gathers (from the ranks that hold parts) the parameters that the model computes with: whoever
    reads them when that one has stepped gets those of the step before.

    Args:
        model: of this rank.
        optimizer: whose `step` is called once a step.
        norm_of: of what a step returned, the applied gradient's norm, where it is known.
        **options: as those of `agent.attach`.

    Returns:
        The monitor.
    """
    step = optimizer.step
    outer = getattr(step, "rankscope", None) or Outer(optimizer, model)
    monitor = attach_to(model, outer, **options)
    if not isinstance(monitor, TorchMonitor) or hasattr(step, "rankscope"):
        return monitor

    optimizer.step = ReportedStep(optimizer, step, outer, monitor, norm_of)
    return monitor


class ReportedStep:
    """An optimizer's `step` that reports its begin and end to the monitor.

    It is kept by whoever pickles or copies the optimizer as the `step` of its class.

    Attributes:
        rankscope: the optimizer as the monitor knows it.
    """

    def __init__(
        self,
        optimizer: Any,
        step: Callable[..., Any],
        outer: Outer,
        monitor: TorchMonitor,
        norm_of: Callable[[Any], float | None],
    ) -> None:
        functools.update_wrapper(self, step)
        self.rankscope = outer
        self._optimizer = optimizer
        self._step = step
        self._monitor = monitor
        self._norm_of = norm_of

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._monitor.step_begins(self.rankscope)
        try:
            result = self._step(*args, **kwargs)
            norm = self._norm_of(result)
            if norm is not None:
                self._monitor.log(grad_norm=norm)
            return result
        finally:
            self._monitor.step_ended(self.rankscope)

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, (self._optimizer, "step"))
