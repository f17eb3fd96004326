"""Takes the agent's hooks off a model while torch.jit compiles it: it would compile them, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.jit import _recursive

from rankscope.agent.guard import process_wide
from rankscope.agent.steps.hook_tables import is_ours

# A place where a module keeps hooks, and all that was in it.
_Taken = list[tuple[dict[int, Any], dict[int, Any]]]

_original: Callable[..., Any] | None = None


def begin() -> None:
    """From now on models with hooks of ours are compiled as if there were none."""
    global _original
    if _original is None:
        _original = _recursive.create_script_module
        _recursive.create_script_module = _without_hooks


def end() -> None:
    """Leaves torch.jit as it was."""
    global _original
    if _original is not None and _recursive.create_script_module is _without_hooks:
        _recursive.create_script_module = _original
        _original = None


def _without_hooks(nn_module: Any, *args: Any, **kwargs: Any) -> Any:
    assert _original is not None
    taken = _take_off(nn_module)
    try:
        return _original(nn_module, *args, **kwargs)
    finally:
        _put_back(taken or [])


@process_wide("hooks")
def _take_off(model: torch.nn.Module) -> _Taken:
    taken: _Taken = []
    for module in model.modules():
        for place in (module._forward_pre_hooks, module._forward_hooks):
            ours = [key for key, hook in place.items() if is_ours(hook)]
            if ours:
                taken.append((place, dict(place)))
                for key in ours:
                    del place[key]
    return taken


@process_wide("hooks")
def _put_back(taken: _Taken) -> None:
    for place, before in taken:
        place.clear()  # in the order in which they were
        place.update(before)
