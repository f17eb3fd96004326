"""Accelerate: attaches to what an accelerator has prepared.

from rankscope import agent
model, optimizer, data = accelerator.prepare(model, optimizer, data)
monitor = agent.accelerate.attach(accelerator)
"""

from __future__ import annotations

from typing import Any

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError("agent.accelerate needs Accelerate: pip install accelerate") from error

from rankscope.agent import attach as attach_to


def attach(accelerator: Accelerator, **options: Any) -> Any:
    """Watches the model and the optimizer that were prepared last, on every rank.

    Args:
        accelerator: after `prepare`.
        **options: as those of `agent.attach`.

    Returns:
        The monitor.

    Raises:
        ValueError: no model, or no optimizer, has been prepared.
    """
    models, optimizers = accelerator._models, accelerator._optimizers
    if not models or not optimizers:
        raise ValueError(
            "agent.accelerate.attach(accelerator): call it after accelerator.prepare(model, "
            "optimizer, ...)"
        )
    # What Accelerate puts around the optimizer has its interface and nothing of its state.
    monitor = attach_to(models[-1], optimizers[-1].optimizer, **options)
    # `accelerator.backward` divides by it, in a smaller last group too.
    monitor.accumulation(divided_by=accelerator.gradient_accumulation_steps)
    return monitor
