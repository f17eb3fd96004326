"""Where a batch enters a model whose own forward is never called.

A `ModuleDict` of an encoder and a decoder has no forward, and many a model with one is trained by
`model.encode(x)` and `model.decode(z)`. Then the module that is given the batch stands for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import is_compiling

from rankscope.agent.model.facts import held
from rankscope.agent.probes.data.given import tensors_in
from rankscope.agent.probes.tables import readable
from rankscope.agent.steps.autograd import functorch_level, graph_task, is_tracing
from rankscope.agent.steps.hook_tables import ModuleHook
from rankscope.agent.steps.hooks import SwitchedHook

_STEPS = 2  # by what differs between them a batch is distinguished from positions, say
_ATTEMPTS = 4  # steps at which no module was called
_ELEMENTS = 1024  # of an input, that are compared
_MOST_MODULES = 4096  # of those without end none is found in a step's time


@dataclass(slots=True)
class _Given:
    """What a module was given first at a step."""

    module: torch.nn.Module
    some: torch.Tensor | None  # a copy of some of its elements; None where they are not here


class _CallHook(ModuleHook):
    """Forward pre-hook of one module."""

    def __init__(self, search: EntrySearch | None = None, name: str = "") -> None:
        self._search = None if search is None else weakref.ref(search)
        self._name = name

    def __call__(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Notifies the search, if it still exists and this is not a copy."""
        if is_compiling() or is_tracing() or functorch_level() is not None or graph_task() != -1:
            return
        search = None if self._search is None else self._search()
        if search is not None and not search.idle:
            search.called(self._name, module, args, kwargs or {})


class EntrySearch:
    """Follows the calls of all modules inside a model for two steps.

    Args:
        model: whose own forward is not called.
        guarded: what contains the errors of a call.

    Attributes:
        idle: calls are of no interest any more, though the hooks are still there.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        guarded: Callable[[str, Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        self.called = guarded("entry", self._module_called)
        self.idle = False
        self._called: set[str] = set()
        self._now: dict[str, _Given] = {}
        self._before: dict[str, _Given] = {}
        self._steps = self._attempts = 0
        self._hooks: list[SwitchedHook] = []
        inside = [(name, m) for name, m in model.named_modules() if name]
        for name, module in inside if len(inside) <= _MOST_MODULES else ():
            if not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
                handle = module.register_forward_pre_hook(
                    _CallHook(self, name), prepend=True, with_kwargs=True
                )
                self._hooks.append(SwitchedHook(handle))

    def _module_called(
        self, name: str, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A module is about to run forward."""
        if not torch.is_grad_enabled() or not module.training or name in self._called:
            return
        parts = name.split(".")
        if any(".".join(parts[:n]) in self._called for n in range(1, len(parts))):
            return  # inside another one
        self._called.add(name)
        given = [t for t in tensors_in(args, kwargs) if readable(t)]
        if not given or given[0].requires_grad:
            return  # what others have made
        self._now[name] = _Given(module, _some(held(given[0]).detach()))

    def found(self) -> torch.nn.Module | None:
        """To be called when a step has ended: the module, as soon as it is known."""
        now, self._now = self._now, {}
        self._called = set()
        if not now:
            self._attempts += 1
            return None
        self._steps += 1
        before, self._before = self._before, now
        changed = [g for name, g in now.items() if name in before and not _same(before[name], g)]
        # Of several that change (a pair, a grid made anew) nothing shows which one is the batch.
        return changed[0].module if self._steps >= _STEPS and len(changed) == 1 else None

    @property
    def is_over(self) -> bool:
        """Whether it is given up."""
        return not self._hooks or self._steps >= _STEPS or self._attempts >= _ATTEMPTS

    def end(self) -> None:
        """No call is followed any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _some(tensor: torch.Tensor) -> torch.Tensor | None:
    """Elements from all over a tensor on the host; None of others, which would be waited for."""
    if not (tensor.is_cpu and tensor.is_contiguous() and tensor.numel()):
        return None
    # Odd: no column of an image again and again.
    step = max(tensor.numel() // _ELEMENTS, 1) | 1
    return tensor.view(-1)[::step].clone()


def _same(last: _Given, given: _Given) -> bool:
    return last.some is not None and given.some is not None and torch.equal(last.some, given.some)
