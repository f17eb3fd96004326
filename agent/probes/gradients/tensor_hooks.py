"""Hooks on the gradients of parameters: registered once, put on and taken off at every sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class TensorHooks:
    """A hook on each of some tensors, all on or all off.

    To put a hook that torch knows back into its table takes a twentieth of registering it anew.

    Args:
        pairs: the tensors, each with its hook.
    """

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, Callable[..., Any]]] = ()) -> None:
        self._entries = [_Entry(tensor, hook) for tensor, hook in pairs]
        self._on: list[_Entry] = []

    def __bool__(self) -> bool:
        return bool(self._on)

    def put_on(self) -> None:
        """Of those that require a gradient; of the others no hook can be."""
        self.take_off()
        on = self._on
        for entry in self._entries:
            tensor = entry.tensor
            if tensor.requires_grad:
                table: Any = tensor._backward_hooks
                if table is not None and table is entry.table:
                    table[entry.key] = entry.hook
                else:
                    entry.register()
                on.append(entry)

    def take_off(self) -> None:
        """Leaves no hook."""
        if self._on:
            for entry in self._on:
                entry.take_off()
            self._on = []


class _Entry:
    __slots__ = ("_handle", "hook", "key", "table", "tensor")

    def __init__(self, tensor: torch.Tensor, hook: Callable[..., Any]) -> None:
        self.tensor = tensor
        self.hook = hook
        self.table: Any = None
        self.key = -1
        self._handle: Any = None

    def register(self) -> None:
        self._handle = self.tensor.register_hook(self.hook)
        table: Any = self.tensor._backward_hooks
        key: Any = getattr(self._handle, "id", None)
        self.table = None
        # Subclasses of tensors may keep their hooks in another way.
        if table is not None and key is not None and table.get(key) is self.hook:
            self.table, self.key = table, key

    def take_off(self) -> None:
        if self.table is None:
            self._handle.remove()
        else:
            self.table.pop(self.key, None)
