"""What can be read off a model and its optimizer at attach: names, tensors, steps."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from rankscope.agent.wire import TensorTable

_WRAPPER_PREFIXES = ("module.", "_orig_mod.")
# Where wrappers keep the optimizer that they wrap.
_INNER = ("optim", "optimizer", "_optimizer", "base_optimizer", "local_optimizer")
_DEEPEST = 5
_ORDINARY = frozenset((torch.Tensor, torch.nn.Parameter))
# What a wrapper has put on a tensor: an ordinary one without any is nobody's part.
_attributes = attrgetter("__dict__")


def plain_name(name: str) -> str:
    """A parameter's name as the user's own model has it, without what wrappers put before it."""
    while True:
        for prefix in _WRAPPER_PREFIXES:
            if name.startswith(prefix):
                name = name[len(prefix) :]
                break
        else:
            return name


def core(model: torch.nn.Module) -> torch.nn.Module:
    """The user's own module inside DDP, torch.compile and the like.

    Its mode distinguishes training from evaluation: people put the inner one into evaluation mode
    and leave the wrapper as it is.
    """
    while not isinstance(model, torch.jit.ScriptModule):
        children = model._modules
        inner = children.get("_orig_mod")
        if inner is None and len(children) == 1:
            inner = children.get("module")
        if inner is None:
            break
        model = inner
    return model


def trainable_parameters(
    model: torch.nn.Module, optimizer: Any
) -> tuple[tuple[str, ...], tuple[torch.nn.Parameter, ...]]:
    """Names and parameters that training can change, in the model's order.

    Those of the model that require a gradient, then those that only the optimizer holds; without
    those of lazy modules that have not run yet.
    """
    found: dict[int, tuple[str, torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not is_unsized(parameter):
            found[id(parameter)] = (plain_name(name), parameter)
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter.requires_grad and not is_unsized(parameter):
                label = f"optimizer.{index}.{position}"
                found.setdefault(id(parameter), (label, parameter))
    names = tuple(name for name, _ in found.values())
    return names, tuple(parameter for _, parameter in found.values())


def is_trained(model: torch.nn.Module, optimizer: Any) -> bool:
    """Whether there is any parameter that training can change, now or once it has a shape."""
    every = (*model.parameters(), *(p for g in optimizer.param_groups for p in g["params"]))
    return any(p.requires_grad for p in every)


def is_unsized(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a lazy module has no shape before its first forward pass."""
    return isinstance(tensor, UninitializedParameter | UninitializedBuffer)


def held(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: the local part of a distributed one, without a collective.

    `full_tensor()` would be one; `to_local()` is a view. A parameter that ZeRO 3 has dealt out is
    empty between two passes: its part is beside it.
    """
    local: torch.Tensor = getattr(
        tensor, "ds_tensor" if is_dealt_out(tensor) else "_local_tensor", tensor
    )
    return local


def are_held_whole(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether `held` of each of them is known to be the tensor itself: asked of all in one go."""
    return _ORDINARY.issuperset(map(type, tensors)) and not any(map(_attributes, tensors))


def all_held(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`held` of each of them."""
    return list(tensors) if are_held_whole(tensors) else [held(t) for t in tensors]


def is_dealt_out(tensor: torch.Tensor) -> bool:
    """Whether DeepSpeed's ZeRO 3 gathers a parameter only while it is computed with.

    Those that are small it keeps whole on every rank.
    """
    return hasattr(tensor, "ds_tensor") and not getattr(tensor, "ds_persist", False)


def gradient_shape(parameter: torch.Tensor) -> torch.Size:
    """Shape of a parameter's gradient as backward passes compute it, on this rank."""
    if is_dealt_out(parameter):
        whole: torch.Size = parameter.ds_shape  # type: ignore[attr-defined]
        return whole
    return held(parameter).shape


def shard(tensor: torch.Tensor) -> str:
    """Which part of the logical tensor this rank holds; empty for the whole of it.

    Read off a distributed tensor's placements: mesh dimensions that replicate it do not count.
    """
    if is_dealt_out(tensor):
        group = getattr(tensor, "ds_process_group", None)
        return f"part@{torch.distributed.get_rank(group)}/{torch.distributed.get_world_size(group)}"
    placements = getattr(tensor, "placements", None)
    mesh = getattr(tensor, "device_mesh", None)
    if placements is None or mesh is None:
        return ""
    coordinate = mesh.get_coordinate() or [0] * len(placements)
    return " ".join(
        f"{placement}@{at}/{mesh.size(dimension)}"
        for dimension, (placement, at) in enumerate(zip(placements, coordinate, strict=True))
        if not placement.is_replicate()
    )


def tensor_table(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> TensorTable:
    """The table that the fingerprints of these tensors refer to."""
    return TensorTable(
        names=tuple(names),
        shapes=tuple(tuple(held(t).shape) for t in tensors),
        dtypes=tuple(str(t.dtype).removeprefix("torch.") for t in tensors),
        shards=tuple(shard(t) for t in tensors),
    )


def wrapper_of(model: torch.nn.Module) -> str:
    """Name of the data-parallel wrapper around the model, empty where there is none."""
    wrappers = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel")
    classes = {c.__name__ for c in type(model).__mro__}
    return next((w for w in wrappers if w in classes), "")


def first_step(optimizer: Any) -> int:
    """Steps that the optimizer has taken before, read off its state; 0 for a fresh one.

    Those of the parameter that has taken most: others may have been frozen for a while. One step
    that has left no trace is none: Horovod's `broadcast_optimizer_state` takes it, with
    gradients of zero, so that there is a state to broadcast.
    """
    state = getattr(optimizer, "state", None) or {}
    every = [p for group in optimizer.param_groups for p in group["params"]]
    held = [state.get(p, {}) for p in every]
    steps = [int(own["step"]) for own in held if own.get("step") is not None]
    taken = max(steps, default=0)
    if taken != 1:
        return taken
    moments = [v for own in held for k, v in own.items() if k != "step" and torch.is_tensor(v)]
    return int(any(bool(moment.any()) for moment in moments) or not moments)


def has_uncounted_steps(optimizer: Any) -> bool:
    """Whether the state of an optimizer has moved, and says nothing of steps (momentum of SGD)."""
    state = getattr(optimizer, "state", None) or {}
    held = [state.get(p, {}) for group in optimizer.param_groups for p in group["params"]]
    if any(own.get("step") is not None for own in held):
        return False
    moments = [v for own in held for v in own.values() if torch.is_tensor(v)]
    return any(bool(moment.any()) for moment in moments)


def wrapped_in(optimizer: Any) -> list[Any]:
    """An optimizer, the one inside it, and so on to the innermost."""
    chain: list[Any] = []
    while optimizer is not None and len(chain) < _DEEPEST:
        if any(optimizer is known for known in chain) or not isinstance(
            getattr(optimizer, "param_groups", None), list
        ):
            break
        chain.append(optimizer)
        attributes = getattr(optimizer, "__dict__", {})
        optimizer = next((attributes[a] for a in _INNER if a in attributes), None)
    return chain
