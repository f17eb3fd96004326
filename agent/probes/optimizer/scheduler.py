"""How often a learning-rate schedule advances.

Schedulers have no hooks. Their classes' `step` is wrapped once a process while a monitor listens,
which is seen by those made before, too, and given back with the last one.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler

from rankscope.agent.guard import process_wide
from rankscope.agent.probes.base import Context, Probe, StepFacts
from rankscope.agent.steps.dynamo import leave_alone
from rankscope.agent.steps.hook_tables import pickled_by_value
from rankscope.agent.steps.listeners import Listeners, Replacement

# Its scheduler advances once a process on purpose: schedules are given the steps of one process.
_BY_PROCESSES = "accelerate.scheduler"


class Scheduler(Probe):
    """`scheduler_steps`: how often the schedule of this optimizer has advanced since attach.

    Costs half a microsecond each time it does, and a look-up in a dictionary where the tier
    `signals` is due. Of several schedulers it is the one that has advanced most, and a chain or
    sequence of them is one; a schedule that is no `LRScheduler`, or is computed by hand, is not
    seen, nor one of a class of the script's own whose `step` does not call that of its base. Where
    Accelerate advances it once for each process, as it does by design, an event
    `scheduler.wrapped` says so.
    """

    name = "scheduler"
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        # Since the last sample.
        self._counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._total = 0
        self._reported = False

    def start(self, facts: StepFacts) -> None:
        """From now on every scheduler of the process is seen."""
        listen(self)

    def after_step(self, facts: StepFacts) -> None:
        """What had been counted when this step was taken."""
        if not self.context.signals:
            return
        if self._counts:
            # Those that were only made since then have advanced by that alone.
            self._total += max(self._counts.values())
            self._counts.clear()
        if self._total:
            facts.scalars["scheduler_steps"] = float(self._total)

    def advanced(self, scheduler: Any, caller: str) -> None:
        """A scheduler of the process has advanced."""
        if not _same(getattr(scheduler, "optimizer", None), self.context.optimizer):
            return
        self._counts[scheduler] = self._counts.get(scheduler, 0) + 1
        if caller == _BY_PROCESSES and not self._reported:
            self._reported = True
            self.context.event(
                self.context.step,
                "scheduler.wrapped",
                "the schedule advances once for each process, as Accelerate does it",
                {"by": "accelerate"},
            )

    def close(self) -> None:
        """Listens no longer."""
        unlisten(self)


def _same(one: Any, other: Any) -> bool:
    """Whether they are one optimizer, or one is a wrapper that shares the other's groups."""
    if one is other:
        return True
    groups: Any = getattr(one, "param_groups", None)
    others: Any = getattr(other, "param_groups", None)
    return bool(groups and others and groups[0] is others[0])


class SchedulerListener(Protocol):
    """Is notified of each step of a scheduler in the process; must not raise."""

    def advanced(self, scheduler: Any, caller: str) -> None:
        """A scheduler's `step` was called, by code of the module `caller`."""


_inside: set[int] = set()  # optimizers whose schedule advances now


def listen(listener: SchedulerListener) -> None:
    """Notifies `listener` of every scheduler's step from now on; it is held weakly."""
    _listeners.add(listener)


def unlisten(listener: SchedulerListener) -> None:
    """Stops notifying `listener`; with the last one gone, torch is as it was."""
    _listeners.remove(listener)


def _replacements() -> Iterator[Replacement]:
    for kind in _kinds(LRScheduler):
        if not pickled_by_value(kind):
            yield Replacement(kind, "step", _notifying)


def _kinds(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for inner in kind.__subclasses__():
        yield from _kinds(inner)


def _notifying(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A subclass calls the step of its base, a sequence those of its parts: that is one.
        optimizer = id(getattr(self, "optimizer", self))
        if torch.compiler.is_compiling() or optimizer in _inside:
            return original(self, *args, **kwargs)
        _inside.add(optimizer)
        try:
            result = original(self, *args, **kwargs)
        finally:
            _inside.discard(optimizer)
        _notify(self, sys._getframe(1).f_globals.get("__name__", ""))
        return result

    return step


@process_wide(Scheduler.name)
def _notify(scheduler: Any, caller: str) -> None:
    for listener in _listeners:
        listener.advanced(scheduler, caller)


_listeners: Listeners[SchedulerListener] = Listeners(_replacements)


leave_alone(_notify)
