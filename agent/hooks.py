"""The framework's own hooks, in a form that is silent on copies and cannot keep a monitor alive.

A hook on a module is copied, pickled and saved with it: a bound method there would break
`copy.deepcopy(model)` and `torch.save(model)`, and a copied model would report as the first. So
what is hooked is an object that knows its monitor weakly and turns into a silent one when copied.

Optimizer steps are seen through the process-wide hooks, which also fire for an optimizer inside a
wrapper that has no hooks of its own. They are set once a process and find the monitors weakly.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from rankscope.agent import scripting
from rankscope.agent.dynamo import (
    in_one_graph,
    leave_alone,
    outside_graph,
    traced_as_constant,
)
from rankscope.agent.graph import nodes_made
from rankscope.agent.step_count import StepCount

# Under a transformation of `torch.func` (`vmap`, `grad`) what a model is given stands for something
# else.
_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level


class ForwardListener(Protocol):
    """Is told of a module's forward; must not raise."""

    def root_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """The module is called."""


class StepListener(ForwardListener, Protocol):
    """Is told of optimizer steps, too."""

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Some optimizer of the process is about to step; not told while all `only_count`."""

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """It has stepped; perhaps not told where nothing but the count of steps is wanted."""

    def step_unseen(self) -> None:
        """Some optimizer's step is compiled in such a way that it will not be told of."""


class RootHook:
    """Forward pre-hook of the root module."""

    # torch.jit looks at the names of a module's hooks.
    __name__ = "rankscope_root_hook"
    of_rankscope = True

    def __init__(self, listener: ForwardListener | None = None) -> None:
        self._listener = None if listener is None else weakref.ref(listener)

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Tells the monitor, if it still lives and this is not a copy."""
        listener = None if self._listener is None else self._listener()
        if listener is not None and not (
            torch.compiler.is_compiling() or torch._C._is_tracing() or _level() is not None
        ):
            listener.root_forward(module, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> RootHook:
        return RootHook()

    def __reduce__(self) -> tuple[Any, ...]:
        # Saved with the model as a hook of the standard library that does nothing, so that the
        # file loads where Rankscope is not installed.
        return (getattr, (contextlib.nullcontext(), "__exit__"))


# A tuple, and replaced as a whole: it is walked at every step.
_steppers: tuple[weakref.ref[Any], ...] = ()
_before_handle: Any = None
_after_handle: Any = None
# Those of them that want to be told of the ends of steps only, with their counts.
_quiet: weakref.WeakKeyDictionary[Any, StepCount] = weakref.WeakKeyDictionary()
# Where there is one listener and it is quiet: its count.
_sole_count: StepCount | None = None


def watch_steps(listener: StepListener) -> None:
    """Tells `listener` of every optimizer step of the process from now on; it is held weakly."""
    global _steppers, _after_handle
    _steppers = (*_living(), weakref.ref(listener, _forget))
    if _after_handle is None:
        _after_handle = register_optimizer_step_post_hook(_after_step)
        scripting.begin()
    _settle()


def unwatch_steps(listener: StepListener) -> None:
    """Stops telling `listener`; takes the process-wide hooks back with the last one."""
    _quiet.pop(listener, None)
    _keep(lambda reference: reference() is not listener)


def only_count(listener: StepListener, count: StepCount | None) -> None:
    """At most steps nothing is due but that they are counted.

    Args:
        listener: is not told that steps begin; that they have ended, where that takes more than to
            count on.
        count: of the listener's steps. None: it is told of everything again.
    """
    if count is None:
        _quiet.pop(listener, None)
    elif listener in (reference() for reference in _steppers):  # and not ended meanwhile
        _quiet[listener] = count
    _settle()


def _settle() -> None:
    global _before_handle, _sole_count
    wanted = len(_quiet) < len(_steppers)
    if wanted and _before_handle is None:
        _before_handle = register_optimizer_step_pre_hook(_before_step)
    elif not wanted and _before_handle is not None:
        _before_handle.remove()
        _before_handle = None
    counts = () if wanted else tuple(_quiet.values())
    _sole_count = counts[0] if len(counts) == len(_steppers) == 1 else None


def _forget(gone: weakref.ref[Any]) -> None:
    _keep(lambda reference: reference is not gone)


def _keep(wanted: Callable[[weakref.ref[Any]], bool]) -> None:
    global _steppers, _after_handle
    _steppers = tuple(r for r in _living() if wanted(r))
    _settle()
    if not _steppers and _after_handle is not None:
        _after_handle.remove()
        _after_handle = None
        scripting.end()


def _living() -> tuple[weakref.ref[Any], ...]:
    return tuple(r for r in _steppers if r() is not None)


# A compiled `optimizer.step` is traced with its hooks: the graph ends there (torch ends it a few
# lines further on anyway), so that they are called. Where it may not end, they see nothing.
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if is_dynamo_compiling():
        if not _cannot_be_called():
            _tell_before(optimizer)
        return
    # As `_tell_before`, without the call: this is done at every step.
    for reference in _steppers:
        listener = reference()
        if listener is not None:
            listener.step_begins(optimizer)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if is_dynamo_compiling():
        if not in_one_graph():
            _tell_after(optimizer)
        return
    count = _sole_count
    if count is not None and count.optimizer() is optimizer:
        step = count.step + 1
        if step < count.until:
            count.step = step
            count.nodes = nodes_made()
            return
    for reference in _steppers:
        listener = reference()
        if listener is not None:
            listener.step_ended(optimizer)


@traced_as_constant
def _cannot_be_called() -> bool:
    if not in_one_graph():
        return False
    for reference in _steppers:
        listener = reference()
        if listener is not None:
            listener.step_unseen()
    return True


@outside_graph
def _tell_before(optimizer: torch.optim.Optimizer) -> None:
    for reference in _steppers:
        listener = reference()
        if listener is not None:
            listener.step_begins(optimizer)


@outside_graph
def _tell_after(optimizer: torch.optim.Optimizer) -> None:
    for reference in _steppers:
        listener = reference()
        if listener is not None:
            listener.step_ended(optimizer)


leave_alone(_before_step)
leave_alone(_after_step)
leave_alone(RootHook.__call__)
