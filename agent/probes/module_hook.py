"""Forward hooks on modules: on no copy, no tie to the monitor, off when done."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from rankscope.agent.steps.dynamo import leave_alone
from rankscope.agent.steps.hook_tables import HiddenHook, ModuleHook


class CallListener(Protocol):
    """Is told of module calls; must not raise."""

    def module_called(self, place: int, module: torch.nn.Module, args: Any, output: Any) -> None:
        """The module registered as number `place` has run forward."""


class CallHook(ModuleHook):
    """Forward hook of one module."""

    def __init__(self, listener: CallListener | None = None, place: int = 0) -> None:
        self._listener = None if listener is None else weakref.ref(listener)
        self._place = place

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Tells the probe, if it still lives and this is not a copy."""
        if torch.compiler.is_compiling() or torch._C._is_tracing():
            return
        listener = None if self._listener is None else self._listener()
        if listener is not None:
            listener.module_called(self._place, module, args, output)


leave_alone(CallHook.__call__)


class ModuleHooks:
    """Forward hooks on some modules, all on or all off."""

    def __init__(self) -> None:
        self._handles: list[HiddenHook] = []

    def __bool__(self) -> bool:
        return bool(self._handles)

    def put_on(self, listener: CallListener, modules: Iterable[torch.nn.Module]) -> None:
        """Hooks modules; their places count from 0."""
        self.take_off()
        self._handles = [
            HiddenHook(module.register_forward_hook(CallHook(listener, place)))
            for place, module in enumerate(modules)
        ]

    def take_off(self) -> None:
        """Leaves no hook."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether a part of the model is compiled: hooks set now would not run, or compile it anew."""
    return any(
        type(m).__name__ == "OptimizedModule"
        or getattr(m, "_compiled_call_impl", None) is not None
        or isinstance(m, torch.jit.ScriptModule)
        for m in model.modules()
    )
