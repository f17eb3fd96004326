"""What becomes of senders when their process forks or ends without having closed them."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import sys
import weakref
from typing import Protocol

from rankscope.agent.guard import describe


class Closable(Protocol):
    """What is to be closed."""

    def close(self, state: str, error: str) -> None:
        """Sends or keeps what is left, and says how the process ended."""

    def forget(self) -> None:
        """This is a forked child, and everything belongs to its parent."""


_open: weakref.WeakSet[Closable] = weakref.WeakSet()


def remember(one: Closable) -> None:
    """Closes it when the process ends; it is held weakly."""
    _open.add(one)


def close_at_exit_of_child() -> None:
    """To be called in the process that is to close what it has opened."""
    # A process that `multiprocessing` made ends by `os._exit`, without `atexit`; finalizers it
    # does call. `mp.spawn` is how many trainers start their ranks.
    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, _close_all, exitpriority=0)


def _forget_in_child() -> None:
    for one in list(_open):
        one.forget()


def _close_all() -> None:
    """Close what nobody closed, while threads still run."""
    error = sys.exc_info()[1]
    if error is None and not hasattr(sys, "ps1"):
        error = getattr(sys, "last_value", None)
    if error is None or (isinstance(error, SystemExit) and not error.code):
        state, text = "finished", ""
    else:
        state, text = "failed", describe(error)
    for one in list(_open):
        one.close(state, text)


os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(_close_all)
