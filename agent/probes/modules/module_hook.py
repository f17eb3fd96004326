"""Forward hooks on modules: on no copy, no tie to the monitor, off when done."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any, Protocol

import torch
from torch.compiler import is_compiling

from rankscope.agent.steps.autograd import is_tracing
from rankscope.agent.steps.dynamo import leave_alone
from rankscope.agent.steps.hook_tables import HiddenHook, ModuleHook

_forward_hooks = attrgetter("_forward_hooks")


class CallListener(Protocol):
    """Is notified of module calls; must not raise."""

    def module_called(self, place: int, module: torch.nn.Module, args: Any, output: Any) -> None:
        """The module registered as number `place` has run forward."""


class CallHook(ModuleHook):
    """Forward hook of one module."""

    def __init__(self, listener: CallListener | None = None, place: int = 0) -> None:
        self._listener = None if listener is None else weakref.ref(listener)
        self._place = place

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Notifies the probe, if it still exists and this is not a copy."""
        if is_compiling() or is_tracing():
            return
        listener = None if self._listener is None else self._listener()
        if listener is not None:
            listener.module_called(self._place, module, args, output)


leave_alone(CallHook.__call__)


class ModuleHooks:
    """Forward hooks on some modules, all on or all off.

    They are registered once and then only put into their tables and taken out again: to register
    one and hide it takes ten times as long.
    """

    def __init__(self) -> None:
        self._on = False
        self._switched = True
        self._modules: Sequence[torch.nn.Module] = ()
        self._listener: CallListener | None = None
        self._handles: list[HiddenHook] = []
        # One a module: its table of hooks, the number of ours in there, and the hook.
        self._tables: list[Any] = []
        self._keys: list[int] = []
        self._calls: list[CallHook] = []

    def __bool__(self) -> bool:
        return self._on

    def put_on(self, listener: CallListener, modules: Sequence[torch.nn.Module]) -> None:
        """Hooks modules; their places count from 0.

        Args:
            listener: is notified of their calls.
            modules: the same object as long as they are the same, and never changed.
        """
        self.take_off()
        same = modules is self._modules and listener is self._listener
        if same and all(map(is_, map(_forward_hooks, modules), self._tables)):
            for table, key, call, handle in zip(
                self._tables, self._keys, self._calls, self._handles, strict=True
            ):
                table[key] = call
                handle.hide()
        else:
            self._register(listener, modules)
        self._on = True

    def take_off(self) -> None:
        """No hook is called any more."""
        if not self._on:
            return
        self._on = False
        if not self._switched:
            self.remove()
        for table, key in zip(self._tables, self._keys, strict=True):
            table.pop(key, None)

    def remove(self) -> None:
        """Leaves no hook, and nothing else either."""
        self._on = False
        for handle in self._handles:
            handle.remove()
        self._modules, self._listener = (), None
        self._handles, self._tables, self._keys, self._calls = [], [], [], []

    def _register(self, listener: CallListener, modules: Sequence[torch.nn.Module]) -> None:
        self.remove()
        self._switched = True
        for place, module in enumerate(modules):
            call = CallHook(listener, place)
            handle = module.register_forward_hook(call)
            self._handles.append(HiddenHook(handle))
            table: Any = module._forward_hooks
            key: Any = getattr(handle, "id", None)
            if table.get(key) is call:
                self._tables.append(table)
                self._keys.append(key)
                self._calls.append(call)
            else:
                self._switched = False  # a class that keeps its hooks in another way than torch
        self._modules, self._listener = modules, listener
