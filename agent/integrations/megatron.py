"""Megatron-core: attaches, and says which ranks hold the same parts of the model.

from rankscope import agent
monitor = agent.megatron.attach(model, optimizer)
"""

from __future__ import annotations

import glob
from typing import Any

try:
    from megatron.core import parallel_state
except ImportError as error:
    raise ImportError("agent.megatron needs Megatron-core: pip install megatron-core") from error

import torch

from rankscope.agent import attach as attach_to
from rankscope.agent.integrations._outer_optimizer import attach_outside
from rankscope.agent.model.facts import first_step, plain_name
from rankscope.agent.steps.torch_monitor import TorchMonitor


def attach(model: torch.nn.Module | list[torch.nn.Module], optimizer: Any, **options: Any) -> Any:
    """Watches a model that is split over tensor, pipeline and expert parallel ranks.

    Args:
        model: the model of this rank, wrapped or not, or the list of its chunks that Megatron's
            `get_model` returns: several where the pipeline is interleaved.
        optimizer: Megatron's, or one of torch.
        **options: as those of `agent.attach`.

    Returns:
        The monitor.
    """
    chunks = list(model) if isinstance(model, list) else [model]
    whole = chunks[0] if len(chunks) == 1 else torch.nn.ModuleList(chunks)
    if isinstance(optimizer, torch.optim.Optimizer):
        monitor = attach_to(whole, optimizer, **options)
    else:
        options.setdefault("step", first_step(optimizer))
        monitor = attach_outside(whole, optimizer, _norm, **options)
    if isinstance(monitor, TorchMonitor):
        for name, parameter in whole.named_parameters():
            key = _part(parameter)
            if key:
                monitor.replicas(key, glob.escape(plain_name(name)))
    return monitor


def _part(parameter: torch.nn.Parameter) -> str:
    """What only some ranks hold: a stage's, a slice's, an expert's; empty for what all hold."""
    parts = []
    # Stages call their layers by the same names: each begins to count at 0.
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        parts.append(f"pipeline {parallel_state.get_pipeline_model_parallel_rank()}")
    # Megatron marks experts' parameters as not to be averaged over all of the data-parallel ranks.
    if not getattr(parameter, "allreduce", True):
        parts.append(f"expert {parallel_state.get_expert_model_parallel_rank()}")
    if getattr(parameter, "tensor_model_parallel", False):
        parts.append(f"tensor {parallel_state.get_tensor_model_parallel_rank()}")
    return ", ".join(parts)


def _norm(result: Any) -> float | None:
    """Megatron's `step` returns: whether it stepped, the norm, the number of zeros."""
    return result[1] if isinstance(result, tuple) and len(result) == 3 else None
