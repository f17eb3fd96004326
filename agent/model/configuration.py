"""What a rank says of itself at attach: a fingerprint of model, optimizer, wrapper and versions.

Ranks whose configurations differ do not train the same thing. JSON-able, and nothing secret: no
arguments, no environment, no paths.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from rankscope.agent.model.facts import core, first_step, is_dealt_out, is_unsized, plain_name
from rankscope.agent.process.device_memory import DeviceMemory
from rankscope.agent.process.git import commit_of
from rankscope.agent.process.resident_memory import memory_limit

_MAX_NAMES = 20
# Names of frozen (or of trained) tensors are reported where there are not more: a list of adapters,
# not of a whole large model.
_MAX_FROZEN = 200
# Settings of modules, and values of each.
_MAX_SETTINGS, _MAX_VALUES, _LONGEST = 200, 8, 60
# Libraries whose only use is to act in environments: their rewards are what is learned from.
_ENVIRONMENTS = ("brax", "dm_env", "envpool", "gym", "gymnasium", "pettingzoo")
_ITSELF = frozenset(("training",))
_DDP_SETTINGS = (
    "broadcast_buffers",
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
    "require_backward_grad_sync",
)


def configuration(model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """Facts that a person wants to see beside the run, and that ranks can be compared by.

    Costs about 5 microseconds a parameter, once.
    """
    parameters = [
        (plain_name(name), p) for name, p in model.named_parameters() if not is_unsized(p)
    ]
    buffers = [(plain_name(name), b) for name, b in model.named_buffers() if not is_unsized(b)]
    trainable = [p.requires_grad for _, p in parameters]
    script = _script()
    classes, settings = _modules(core(model))
    return {
        # The script's name only: arguments and environment may hold secrets.
        "script": "" if script is None else script.name,
        "git_commit": commit_of(Path.cwd() if script is None else script.parent),
        "model": type(core(model)).__name__,
        "parameters": sum(p.numel() for _, p in parameters),
        "trainable_parameters": sum(p.numel() for _, p in parameters if p.requires_grad),
        "parameter_tensors": len(parameters),
        "modules": classes,
        "module_settings": settings,
        # Names, shapes, dtypes and their order: those of the whole tensors where they are sharded.
        "parameters_digest": _layout(parameters),
        "trainable_digest": _digest(str(int(t)) for t in trainable),
        "frozen_tensors": trainable.count(False),
        **_names_by_training(parameters),
        "buffers_digest": _layout(buffers),
        "buffer_tensors": len(buffers),
        "dtypes": dict(Counter(str(p.dtype).removeprefix("torch.") for _, p in parameters)),
        "tied": _tied(model),
        "training_mode": model.training,
        "optimizer": type(optimizer).__name__,
        "optimizer_tensors": _held_by(optimizer, parameters),
        # As its state counts them: what was restored, or not, before the first step.
        "optimizer_steps": first_step(optimizer),
        "parameter_groups": [
            {k: v for k, v in group.items() if isinstance(v, bool | int | float | str)}
            for group in optimizer.param_groups
        ],
        "data_parallel": _data_parallel(model),
        "sharded_over": _sharded_over(model),
        "precision": _precision(),
        "determinism": _determinism(),
        "environments": [name for name in _ENVIRONMENTS if name in sys.modules],
        "torch": torch.__version__,
        "python": ".".join(str(n) for n in sys.version_info[:3]),
        "numpy": np.__version__,
        "cuda": torch.version.cuda or "",
        "device": str(next((p.device for p in model.parameters()), "cpu")),
        "device_name": _device_name(model),
        "threads": torch.get_num_threads(),
        "memory_limits": _memory_limits(model),
    }


def _names_by_training(parameters: Sequence[tuple[str, torch.Tensor]]) -> dict[str, list[str]]:
    """Names of the frozen parameters, or of the trained ones, whichever are few; else nothing."""
    for key, wanted in (("frozen", False), ("trained", True)):
        names = [name for name, p in parameters if p.requires_grad is wanted]
        if len(names) <= _MAX_FROZEN:
            return {key: names}
    return {}


def _modules(model: torch.nn.Module) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """What a model is made of that no tensor shows: rates of dropout, epsilons, activations.

    Read off the modules' own plain attributes: no code of the user's is called, as a `__repr__`
    would be, and no device is asked. Of the user's own classes no texts: they may be paths or keys.

    Returns:
        Class -> number of such modules; and setting, as `Dropout.p` -> value -> number of modules
        that have it. Settings of torch's own classes come first.
    """
    classes: Counter[str] = Counter()
    found: dict[bool, dict[str, Counter[str]]] = {True: {}, False: {}}
    for module in model.modules():
        kind = type(module)
        classes[kind.__name__] += 1
        of_torch = kind.__module__.startswith("torch.")
        own = found[of_torch]
        prefix = kind.__name__ if of_torch else f"{kind.__name__}()"
        for name, value in vars(module).items():
            if name.startswith("_") or name in _ITSELF or (isinstance(value, str) and not of_torch):
                continue
            text = _text(value)
            if text is not None:
                own.setdefault(f"{prefix}.{name}", Counter())[text] += 1
    ordered = [(name, values) for part in found.values() for name, values in sorted(part.items())]
    return (
        dict(classes.most_common(_MAX_SETTINGS)),
        {n: dict(sorted(v.items())[:_MAX_VALUES]) for n, v in ordered[:_MAX_SETTINGS]},
    )


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, bool | int | float):
        return str(value)
    if isinstance(value, str) and len(value) <= _LONGEST:
        return value
    if isinstance(value, tuple) and len(value) <= _MAX_VALUES:
        inner = [_text(item) for item in value]
        return None if None in inner else f"({', '.join(map(str, inner))})"
    return None


def _held_by(optimizer: Any, parameters: Sequence[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """What the optimizer holds of the model, and the model of the optimizer.

    An optimizer built before the model was moved, wrapped or given new heads holds tensors that
    are not the model's any more, and moves nothing.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    names = {id(p): name for name, p in parameters}
    trained = [(name, p) for name, p in parameters if p.requires_grad]
    missing = [name for name, p in trained if id(p) not in held]
    return {
        "count": len(held),
        "of_the_model": sum(i in names for i in held) / len(held) if held else 0.0,
        "share_of_trainable": 1.0 - len(missing) / len(trained) if trained else 0.0,
        "missing": missing[:_MAX_NAMES],
        "missing_count": len(missing),
        "order_digest": _digest(
            f"{index}:{names.get(id(p), '')}"
            for index, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        ),
    }


def _tied(model: torch.nn.Module) -> list[list[str]]:
    """Names under which the model holds one and the same parameter."""
    found: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[id(parameter)].append(plain_name(name))
    return [names for names in found.values() if len(names) > 1][:_MAX_NAMES]


def _data_parallel(model: torch.nn.Module) -> dict[str, Any]:
    """The settings of DistributedDataParallel; empty for other wrappers."""
    ddp = getattr(model, "_orig_mod", model)
    if not isinstance(ddp, DistributedDataParallel):
        return {}
    # A communication hook changes what is reduced: compression, or another group of ranks.
    hooks = [getattr(hook, "__qualname__", type(hook).__name__) for hook, _ in ddp._comm_hooks]
    return {
        **{name: bool(getattr(ddp, name, False)) for name in _DDP_SETTINGS},
        "communication_hooks": hooks,
        **_local_sgd(ddp),
        **_low_rank(ddp),
        "ignored": sorted(plain_name(n) for n in ddp.parameters_to_ignore)[:_MAX_NAMES],
        "group_size": ddp.process_group.size(),
        "backend": torch.distributed.get_backend(ddp.process_group),
    }


def _sharded_over(model: torch.nn.Module) -> dict[str, int]:
    """The ranks over which FSDP or ZeRO 3 deals the parameters out: each reads its own batches.

    Tensor parallelism cuts parameters, too, and its ranks share a batch: the tensors alone do not
    show it. Ranks of a mesh lie at equal distances: `first`, `step` and `count`; empty for none.
    """
    groups = (_sharding_group(module) for module in model.modules())
    dealt = (getattr(p, "ds_process_group", None) for p in model.parameters() if is_dealt_out(p))
    for group in chain(groups, dealt):
        if group is None or group.size() < 2:
            continue
        ranks = torch.distributed.get_process_group_ranks(group)
        step = ranks[1] - ranks[0]
        if ranks == [ranks[0] + step * n for n in range(len(ranks))]:
            return {"first": ranks[0], "step": step, "count": len(ranks)}
    return {}


def _sharding_group(module: torch.nn.Module) -> Any:
    """Of what `fully_shard` or FSDP has made of a module; None for others."""
    classes = {c.__name__ for c in type(module).__mro__}
    if "FullyShardedDataParallel" in classes:
        return getattr(module, "process_group", None)
    if "FSDPModule" not in classes:
        return None
    # torch has no public way to ask. Not every module has parameters of its own to deal out.
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    mesh = getattr(getattr(state, "_fsdp_param_group", None), "mesh_info", None)
    return getattr(mesh, "shard_process_group", None)


def _local_sgd(ddp: DistributedDataParallel) -> dict[str, int]:
    """From which step of this process on gradients are no longer reduced over all ranks, if ever.

    Post-local SGD (`torch.distributed.algorithms`) averages the parameters then.
    """
    for _, state in ddp._comm_hooks:
        first = getattr(state, "start_localSGD_iter", None)
        if isinstance(first, int):
            return {"local_from": first}
    return {}


def _low_rank(ddp: DistributedDataParallel) -> dict[str, dict[str, float]]:
    """The settings of PowerSGD, which decide what tensors it replaces by products of low rank.

    A hook that makes what it is given smaller has the inner hook's state.
    """
    for _, state in ddp._comm_hooks:
        rank = getattr(state, "matrix_approximation_rank", None)
        rate = getattr(state, "min_compression_rate", None)
        if isinstance(rank, int) and isinstance(rate, int | float):
            feedback = bool(getattr(state, "use_error_feedback", False))
            return {"low_rank": {"rank": rank, "least_rate": rate, "feedback": feedback}}
    return {}


def _precision() -> dict[str, Any]:
    return {
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "autocast": torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"),
        "float32_matmul": torch.get_float32_matmul_precision(),
        "cudnn_tf32": bool(torch.backends.cudnn.allow_tf32),
    }


def _determinism() -> dict[str, Any]:
    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": bool(torch.backends.cudnn.deterministic),
        "cudnn_benchmark": bool(torch.backends.cudnn.benchmark),
    }


def _device_name(model: torch.nn.Module) -> str:
    device = next((p.device for p in model.parameters()), None)
    if device is None or device.type != "cuda" or not torch.cuda.is_initialized():
        return ""
    name: str = torch.cuda.get_device_name(device)
    return name


def _memory_limits(model: torch.nn.Module) -> dict[str, int]:
    """Bytes that there are: for all processes of the machine or container, and of the device."""
    device = next((p.device for p in model.parameters()), None)
    return {"process": memory_limit(), "cuda": DeviceMemory(device).limit()}


def _script() -> Path | None:
    """The file that was started; None in a notebook and at a prompt."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(path).absolute() if isinstance(path, str) else None


def _layout(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    return _digest(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in tensors)


def _digest(texts: Iterable[str]) -> str:
    hashed = hashlib.blake2b(digest_size=8)
    for text in texts:
        hashed.update(text.encode(errors="replace") + b"\n")
    return hashed.hexdigest()
