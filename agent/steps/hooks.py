"""The framework's own hooks, in a form that no copy has and that cannot keep a monitor alive.

A hook on a module is hidden from whatever copies, pickles and saves the module: see `hook_tables`.

Optimizer steps are seen through the process-wide hooks, which also fire for an optimizer inside a
wrapper that has no hooks of its own. They are set once a process and find the monitors weakly.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from rankscope.agent.guard import is_quiet, quiet_while
from rankscope.agent.process.device_graph import is_recording
from rankscope.agent.steps import scripting
from rankscope.agent.steps.autograd import functorch_level, is_tracing, nodes_made
from rankscope.agent.steps.count import StepCount
from rankscope.agent.steps.dynamo import (
    in_one_graph,
    leave_alone,
    outside_graph,
    traced_as_constant,
)
from rankscope.agent.steps.hook_tables import ModuleHook, hide, unhide


class ForwardListener(Protocol):
    """Is notified of a module's forward; must not raise."""

    def root_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """The module is called."""


class StepListener(ForwardListener, Protocol):
    """Is notified of optimizer steps, too."""

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Some optimizer of the process is about to step; not called where only ends are wanted."""

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """It has stepped; may be left out where nothing but the count of steps is wanted."""

    def step_unseen(self) -> None:
        """Some optimizer's step is compiled in such a way that it causes no notification."""

    def step_recorded(self) -> None:
        """Some optimizer's step is recorded into a graph of a device, to be done later and again.

        Nothing may be asked of the device meanwhile.
        """


class RootHook(ModuleHook):
    """Forward pre-hook of the root module."""

    def __init__(self, listener: ForwardListener | None = None) -> None:
        self._listener = None if listener is None else weakref.ref(listener)

    # Without `kwargs` where another thread has just taken the hook off.
    def __call__(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Notifies the monitor, if it still exists and this is not a copy."""
        # Asked first: before torch 2.6 the reference would break a graph that may not end.
        if is_compiling() or is_tracing() or functorch_level() is not None:
            return
        listener = None if self._listener is None else self._listener()
        if listener is not None:
            listener.root_forward(module, args, kwargs or {})


class SwitchedHook:
    """A hook of torch that is taken off and put on again many times.

    Registering it anew each time takes three times as long, and is a fifth of a sample of a short
    step.

    Args:
        handle: of a hook that is on. Of one that is not torch's own the hook stays on.
        first: it is the first of its place, also when it is put on again; else the last.

    Attributes:
        is_on: whether it is.
    """

    __slots__ = ("_first", "_handle", "_key", "_places", "is_on")

    def __init__(self, handle: RemovableHandle, *, first: bool = False) -> None:
        hide(handle)
        self._first = first
        self._handle = handle
        self._places: list[tuple[Any, Any]] = []
        self._key = -1
        self.is_on = True
        if isinstance(handle, RemovableHandle):
            self._key = handle.id
            tables = [place() for place in (handle.hooks_dict_ref, *handle.extra_dict_ref)]
            self._places = [(t, t[self._key]) for t in tables if t is not None and self._key in t]

    def put_on(self) -> None:
        """As the first or the last of its place."""
        # The hook itself last, when what torch wants to know of it is there.
        for table, entry in reversed(self._places):
            table[self._key] = entry
            if self._first:
                table.move_to_end(self._key, last=False)
        self.is_on = True

    def take_off(self) -> None:
        """It is not called any more."""
        for table, _ in self._places:
            table.pop(self._key, None)
        self.is_on = not self._places

    def remove(self) -> None:
        """Takes it off for good."""
        self.take_off()
        unhide(self._handle)

    def belongs_to(self, *tables: Any) -> bool:
        """Whether these are the tables of hooks that it is put into."""
        return [id(table) for table, _ in self._places] == [id(table) for table in tables]


class Watching:
    """That a listener, which is held weakly, is notified of every optimizer step of the process."""

    __slots__ = ("count", "listener")

    def __init__(self, listener: StepListener) -> None:
        global _steppers, _before, _after_handle
        self.listener = weakref.ref(listener, self._gone)
        self.count: StepCount | None = None
        _steppers = (*_living(), self)
        if _before is None:
            _before = SwitchedHook(register_optimizer_step_pre_hook(_before_step))
            _after_handle = register_optimizer_step_post_hook(_after_step)
            scripting.begin()
        _settle()

    def only_count(self, count: StepCount | None) -> None:
        """At most steps nothing is due but that they are counted.

        Args:
            count: of the listener's steps. It is not notified of starts of steps, and of ends only
                where `count.until` says so. None: it is notified of everything again.
        """
        self.count = count
        _settle()

    def end(self) -> None:
        """Notifies it no longer; with the last one the process-wide hooks are gone."""
        global _steppers, _before, _after_handle
        _steppers = tuple(w for w in _living() if w is not self)
        _settle()
        if not _steppers and _after_handle is not None:
            _after_handle.remove()
            _before = _after_handle = None
            scripting.end()

    def _gone(self, reference: weakref.ref[Any]) -> None:
        self.end()


# A tuple, and replaced as a whole: it is walked at every step.
_steppers: tuple[Watching, ...] = ()
_before: SwitchedHook | None = None
_after_handle: RemovableHandle | None = None
# Where there is one listener and its steps are only counted: their count.
_sole_count: StepCount | None = None


def _living() -> tuple[Watching, ...]:
    return tuple(w for w in _steppers if w.listener() is not None)


def _settle() -> None:
    global _sole_count
    notified = False
    for watching in _steppers:
        if watching.count is None:
            notified = True
    _sole_count = _steppers[0].count if len(_steppers) == 1 else None
    if _before is not None and notified is not _before.is_on:
        if notified:
            _before.put_on()
        else:
            _before.take_off()


# A compiled `optimizer.step` is traced with its hooks: the graph ends there (torch ends it a few
# lines further on anyway), so that they are called. Where it may not end, they see nothing.
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if is_dynamo_compiling():
        if not _cannot_be_called():
            _notify_before(optimizer)
        return
    if is_quiet():
        return
    # As `_notify_before`, without the call: this is done at every step.
    for watching in _steppers:
        listener = watching.listener()
        if listener is not None:
            listener.step_begins(optimizer)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if is_dynamo_compiling():
        if not in_one_graph():
            _notify_after(optimizer)
        return
    if is_quiet():
        for watching in _steppers:
            listener = watching.listener()
            if listener is not None:
                listener.step_recorded()
        return
    count = _sole_count
    if count is not None and count.optimizer is optimizer and count.passed(nodes_made()):
        return
    for watching in _steppers:
        listener = watching.listener()
        if listener is not None:
            listener.step_ended(optimizer)


@traced_as_constant
def _cannot_be_called() -> bool:
    if not in_one_graph():
        return False
    for watching in _steppers:
        listener = watching.listener()
        if listener is not None:
            listener.step_unseen()
    return True


@outside_graph
def _notify_before(optimizer: torch.optim.Optimizer) -> None:
    for watching in _steppers:
        listener = watching.listener()
        if listener is not None:
            listener.step_begins(optimizer)


@outside_graph
def _notify_after(optimizer: torch.optim.Optimizer) -> None:
    for watching in _steppers:
        listener = watching.listener()
        if listener is not None:
            listener.step_ended(optimizer)


quiet_while(is_recording)
leave_alone(_before_step)
leave_alone(_after_step)
leave_alone(RootHook.__call__)
