"""The modules of a model under their names, found again only when one was added or replaced."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch

_children, _values = attrgetter("_modules"), methodcaller("values")
_compiled_call = attrgetter("_compiled_call_impl")


class NamedModules:
    """What `named_modules()` of a model says, without walking the model each time.

    A walk costs 2 microseconds a module, the question whether anything has changed 0.2: it is put
    in loops that are not Python's.

    Args:
        model: the root.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._found: list[tuple[str, torch.nn.Module]] | None = None
        self._tables: list[Any] = []
        self._sizes: list[int] = []
        self._names: list[str] = []
        self._inside: list[Any] = []
        self._is_scripted = False
        # Scripted modules, and classes with an answer of their own, are asked.
        self._buffers_are_plain = (
            type(model).named_buffers is torch.nn.Module.named_buffers
            and type(model)._named_members is torch.nn.Module._named_members
            and not isinstance(model, torch.jit.ScriptModule)
        )

    def named(self) -> list[tuple[str, torch.nn.Module]]:
        """The list of names and modules, not to be changed: the same object until they change."""
        if self._found is None or self._changed(self._found):
            return self._walk()
        return self._found

    def named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """What `named_buffers()` of the model says: each buffer once, under its first name."""
        if not self._buffers_are_plain:
            return list(self._model.named_buffers())
        seen: dict[int, tuple[str, torch.Tensor]] = {}
        for prefix, module in self.named():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    seen.setdefault(id(buffer), (f"{prefix}.{key}" if prefix else key, buffer))
        return list(seen.values())

    def is_compiled(self) -> bool:
        """Whether a part is compiled: hooks set now would not run, or have it compiled anew."""
        found = self.named()
        return self._is_scripted or any(_compiled_call(m) is not None for _, m in found)

    def _walk(self) -> list[tuple[str, torch.nn.Module]]:
        found = list(self._model.named_modules())
        modules = [m for _, m in found]
        self._is_scripted = any(
            type(m).__name__ == "OptimizedModule" or isinstance(m, torch.jit.ScriptModule)
            for m in modules
        )
        # Scripted modules keep theirs elsewhere; who names them otherwise is asked each time.
        known = all(
            isinstance(m._modules, dict)
            and type(m).named_modules is torch.nn.Module.named_modules
            and "named_modules" not in vars(m)
            for m in modules
        )
        self._found = found if known else None
        if known:
            self._tables = list(map(_children, modules))
            self._sizes = list(map(len, self._tables))
            self._names = list(chain.from_iterable(self._tables))
            self._inside = list(chain.from_iterable(map(_values, self._tables)))
        return found

    def _changed(self, found: list[tuple[str, torch.nn.Module]]) -> bool:
        tables = self._tables
        if not all(map(is_, tables, (m._modules for _, m in found))):
            return True  # a table was replaced as a whole
        # By identity: a module may say that it is equal to another one.
        return (
            list(map(len, tables)) != self._sizes
            or list(chain.from_iterable(tables)) != self._names
            or not all(map(is_, chain.from_iterable(map(_values, tables)), self._inside))
        )
