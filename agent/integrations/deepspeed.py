"""DeepSpeed: attaches to an engine, whatever stage of ZeRO its optimizer is of.

from rankscope import agent
engine, *_ = deepspeed.initialize(model=model, config=config)
monitor = agent.deepspeed.attach(engine)
"""

from __future__ import annotations

from typing import Any

try:
    from deepspeed import DeepSpeedEngine
except ImportError as error:
    raise ImportError("agent.deepspeed needs DeepSpeed: pip install deepspeed") from error

import torch

from rankscope.agent import attach as attach_to
from rankscope.agent.integrations._outer_optimizer import attach_outside


def attach(engine: DeepSpeedEngine, **options: Any) -> Any:
    """Watches what an engine trains, on every rank.

    Args:
        engine: what `deepspeed.initialize` returned first.
        **options: as those of `agent.attach`.

    Returns:
        The monitor.
    """
    optimizer = engine.optimizer
    options.setdefault("step", engine.global_steps)
    if isinstance(optimizer, torch.optim.Optimizer):
        return attach_to(engine, optimizer, **options)
    return attach_outside(
        engine, optimizer, lambda _: getattr(optimizer, "_global_grad_norm", None), **options
    )
