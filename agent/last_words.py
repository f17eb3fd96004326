"""How a process ends: what it still says when it exits, crashes or is told to terminate.

The server tells a dead rank from its victims by who could still speak. When one rank of a torchrun
job dies, the launcher terminates the others within a tenth of a second, and a process that has no
handler for SIGTERM dies without a word, just like the culprit. A Python handler alone would make it
worse: it runs only when the main thread comes back from the collective it is blocked in, so the
process would no longer die when told to. Therefore the signal's C-level wake-up byte is read by a
thread of ours, which speaks, restores the default action and sends the signal again.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType

Speak = Callable[[str, str], None]


class LastWords:
    """Calls `speak(state, error)` once, when the process ends by itself, by error or by SIGTERM.

    Args:
        speak: must return within seconds; `state` is `finished` or `failed`.
    """

    def __init__(self, speak: Speak) -> None:
        self._speak = speak
        self._said = threading.Lock()
        self._pid = os.getpid()
        self._previous_hook = sys.excepthook
        self._socket: socket.socket | None = None
        sys.excepthook = self._excepthook
        atexit.register(self._at_exit)
        self._watch_sigterm()

    def close(self) -> None:
        """The monitor was closed by hand: nothing is left to say."""
        self._said.acquire(blocking=False)
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._previous_hook
        self._unwatch_sigterm()

    def _say(self, state: str, error: str) -> None:
        # A forked child inherits all of this and has nothing to say.
        if os.getpid() == self._pid and self._said.acquire(blocking=False):
            self._speak(state, error)

    def _at_exit(self) -> None:
        self._say("finished", "")

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # The message of a failed collective names what broke; the traceback stays with the user.
        self._say("failed", "".join(traceback.format_exception_only(kind, error)).strip()[:2000])
        self._previous_hook(kind, error, trace)

    # ------------------------------------------------------------------------------------- SIGTERM

    def _watch_sigterm(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return  # the trainer, or its framework, handles it
        reader, writer = socket.socketpair()
        reader.setblocking(True)
        writer.setblocking(False)
        previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        if previous != -1:  # an event loop listens there
            signal.set_wakeup_fd(previous)
            reader.close()
            writer.close()
            return
        signal.signal(signal.SIGTERM, _terminate_by_default)
        self._socket = writer
        self._reader = reader
        os.register_at_fork(after_in_child=_restore_default_in_child)
        threading.Thread(target=self._listen, name="rankscope-signals", daemon=True).start()

    def _unwatch_sigterm(self) -> None:
        if self._socket is None or os.getpid() != self._pid:
            return
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
            if signal.getsignal(signal.SIGTERM) is _terminate_by_default:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._socket.close()
        self._socket = None

    def _listen(self) -> None:
        while received := self._reader.recv(64):
            if signal.SIGTERM not in received:
                continue
            if signal.getsignal(signal.SIGTERM) is not _terminate_by_default:
                continue  # the trainer has set a handler since
            self._say("failed", "terminated by SIGTERM")
            _die_of_sigterm()


def _terminate_by_default(number: int, frame: FrameType | None) -> None:
    """What Python calls for SIGTERM; the listening thread ends the process, this one just stops.

    Blocks the main thread until then, so that the program does nothing after it was told to end.
    """
    threading.Event().wait(5.0)
    _die_of_sigterm()


def _die_of_sigterm() -> None:
    # `signal.signal` works in the main thread only, which may be blocked: hence libc's.
    ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)
    os.kill(os.getpid(), signal.SIGTERM)


def _restore_default_in_child() -> None:
    if signal.getsignal(signal.SIGTERM) is _terminate_by_default:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
