"""Steps that a rank misses because its inputs have ended before those of the others.

In torch's `Join` a rank that has no more inputs answers the collectives of those that have, and
does not step: from then on its steps would carry the numbers of others' earlier ones, and at the
next epoch every comparison would be of two different steps. `Join` has no hook for who looks on.
Its `__exit__`, in which the rank waits, is wrapped once a process while a monitor listens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from rankscope.agent.guard import process_wide
from rankscope.agent.steps.listeners import Listeners, Replacement


class JoinListener(Protocol):
    """Is told of steps that this rank does not take; must not raise."""

    @property
    def step_in_progress(self) -> int:
        """The number of the step in progress."""

    def trains_in(self, module: torch.nn.Module) -> bool:
        """Whether what it listens for is the module, holds it or is held by it."""

    def missed(self, steps: int) -> None:
        """The others have taken so many steps, and this rank none."""


def listen(listener: JoinListener) -> None:
    """Tells `listener` of missed steps from now on; it is held weakly."""
    _listeners.add(listener)


def unlisten(listener: JoinListener) -> None:
    """Tells `listener` nothing more; with the last one gone, torch is as it was."""
    _listeners.remove(listener)


def _replacements() -> Iterator[Replacement]:
    if torch.distributed.is_available():
        from torch.distributed.algorithms.join import Join

        yield Replacement(Join, "__exit__", _counting)


def _counting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __exit__(self: Any, *args: Any) -> Any:
        _look_on(self)
        return original(self, *args)

    return __exit__


@process_wide("steps")
def _look_on(join: Any) -> None:
    """Puts a hook behind those of the wrappers that join; a `Join` is left only once."""
    from torch.distributed.algorithms.join import JoinHook

    class Counted(JoinHook):
        """Counts the steps of the others from here on."""

        def __init__(self, listener: JoinListener, wrapper: Any) -> None:
            self._listener = listener
            self._wrapper = wrapper
            self._began = listener.step_in_progress
            self._missed = 0

        @process_wide("steps")
        def main_hook(self) -> None:
            # What the wrapper's own hook has just found out: whether the others' pass reduces
            # gradients, or only adds them up (`no_sync`).
            self._missed += bool(self._wrapper.require_forward_param_sync)

        @process_wide("steps")
        def post_hook(self, is_last_joiner: bool) -> None:
            # A sharded optimizer steps while it waits, too: such steps are counted already.
            counted = self._listener.step_in_progress - self._began
            if self._missed > counted:
                self._listener.missed(self._missed - counted)

    wrappers = [
        j
        for j in join._joinables
        if isinstance(j, torch.nn.Module) and hasattr(j, "require_forward_param_sync")
    ]
    for listener in _listeners:
        trained = next((w for w in wrappers if listener.trains_in(w)), None)
        if trained is not None:
            join._join_hooks.append(Counted(listener, trained))


_listeners: Listeners[JoinListener] = Listeners(_replacements)
