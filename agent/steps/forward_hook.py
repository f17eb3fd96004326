"""The hook on a monitor's own model, which is off where nothing looks at forward passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rankscope.agent.steps import hooks
from rankscope.agent.steps.dynamo import frames_traced
from rankscope.agent.steps.entry import EntrySearch


class ForwardHook:
    """Puts it on and takes it off; it is on from the start.

    Where the model itself is never called it goes to the module inside that is given the batch.

    Args:
        model: of the monitor.
        listener: the monitor; held weakly.
        guarded: what contains the errors of a call.

    Attributes:
        calls: of the model while it was on, counted by the listener.
    """

    __slots__ = (
        "_guarded",
        "_hook",
        "_listener",
        "_may_search",
        "_model",
        "_search",
        "_traced",
        "_wanted",
        "calls",
    )

    def __init__(
        self,
        model: torch.nn.Module,
        listener: hooks.ForwardListener,
        guarded: Callable[[str, Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        self.calls = 0
        self._model = model
        self._listener = hooks.RootHook(listener)
        self._guarded = guarded
        self._hook: hooks.SwitchedHook | None = None
        self._wanted = True
        self._may_search = True
        self._traced = frames_traced()
        self._search: EntrySearch | None = None
        self._put_on()

    def want(self, wanted: bool) -> None:
        """From now on it is on, or off."""
        if wanted is self._wanted:
            return
        self._wanted = wanted
        hook = self._hook
        if wanted:
            if hook is None or not hook.is_on:
                self._put_on()
        elif hook is not None and hook.is_on and not frames_traced():
            # A compiled model would be compiled anew without it: there it stays, and does nothing.
            hook.take_off()

    def count_from_now(self) -> None:
        """Is on until it is not wanted; may be called from another thread."""
        hook = self._hook
        if hook is not None and not hook.is_on:
            # Where steps are short it is off between samples; the next step takes it off again.
            self._wanted = True
            hook.put_on()

    def step_ended(self) -> None:
        """A step has ended during all of which it was on."""
        search = self._search
        if search is None:
            # What is compiled would be compiled anew for a hook.
            if not self.calls and self._may_search and frames_traced() == self._traced:
                self._may_search = False
                if not any(map(_is_compiled, self._model.modules())):
                    self._search = EntrySearch(self._model, self._guarded)
            return
        if frames_traced() != self._traced:
            search.idle = True  # the hooks stay where they are: they are part of what was compiled
            return
        entry = None if self.calls else search.found()
        if entry is not None:
            if self._hook is not None:
                self._hook.remove()
            self._model, self._hook = entry, None
            self._put_on()
            if not self._wanted and self._hook is not None:
                self._hook.take_off()
        if entry is not None or self.calls or search.is_over:
            search.end()
            self._search = None

    def remove(self) -> None:
        """Takes it off for good."""
        if self._search is not None:
            self._search.end()
        if self._hook is not None:
            self._hook.remove()

    def _put_on(self) -> None:
        model, hook = self._model, self._hook
        # Some people take all hooks off a module by giving it an empty table of them.
        if hook is not None and hook.belongs_to(
            model._forward_pre_hooks, model._forward_pre_hooks_with_kwargs
        ):
            hook.put_on()
        elif not isinstance(model, torch.jit.ScriptModule):  # which takes no hooks
            # Before others' hooks: in that of FSDP2, which gathers the parameters, a rank waits for
            # the others, and it would look as if it waited for its data.
            self._hook = hooks.SwitchedHook(
                model.register_forward_pre_hook(self._listener, prepend=True, with_kwargs=True),
                first=True,
            )


def _is_compiled(module: torch.nn.Module) -> bool:
    return (
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
    )
