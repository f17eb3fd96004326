"""How a process ends: its exit report, and what becomes of senders that nobody has closed.

The server distinguishes a dead rank from its victims by who could still send an exit report. When
one rank of a torchrun job dies, the launcher terminates the others within a tenth of a second, and
a process that has no handler for SIGTERM dies without a report, just like the culprit. A Python
handler alone would make it worse: it runs only when the main thread comes back from the collective
it is blocked in, so the process would no longer die when asked to. Therefore the signal's C-level
wake-up byte is read by a thread of ours, which reports, restores the default action and sends the
signal again.

An error that is handled by `sys.exit(1)` (Hydra does so with all of them) is as good as one that is
not, and an exit with another code than 0 is a failure to whoever started the process: the
interpreter hides with which code it exits, so that `sys.exit` is wrapped.

Senders that no report has closed are closed last; in a forked child they are made harmless.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import multiprocessing.util
import os
import signal
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from multiprocessing.popen_fork import Popen
from multiprocessing.process import BaseProcess
from types import FrameType, TracebackType
from typing import Any, NoReturn, Protocol, cast

from rankscope.agent.guard import describe
from rankscope.agent.process.thread_phase import place_of, place_of_error

Report = Callable[[str, str], None]

_TERMINATED = "terminated by SIGTERM"

_reports: list[Report] = []
# Threads in which a report is sent before the process ends, and whether SIGTERM came to them
# meanwhile.
_leaving: dict[int, bool] = {}
_watched: _Watched | None = None


def add(report: Report) -> None:
    """Has `report(state, error)` called when the process ends.

    Args:
        report: must return within seconds; `state` is `finished` or `failed`.
    """
    global _watched
    if _watched is None or _watched.pid != os.getpid():
        _reports.clear()  # a forked child has nothing to report for its parent
        _watched = _Watched()
    _reports.append(report)


def remove(report: Report) -> None:
    """Takes a report back; with the last one, the process is as it was."""
    global _watched
    if report in _reports:
        _reports.remove(report)
    if not _reports and _watched is not None:
        _watched.close()
        _watched = None


def begin_to_leave() -> None:
    """This thread is about to send its report before the process ends, and then to take it back.

    The report stays added meanwhile: whoever ends the process calls it, and waits until it is sent.
    """
    _leaving[threading.get_ident()] = False


def leave(report: Report) -> None:
    """Takes a report back that was sent; ends the process if SIGTERM came meanwhile."""
    terminated = _leaving.pop(threading.get_ident(), False)
    remove(report)
    if terminated:
        _die_of_sigterm()


def place() -> str:
    """Where in the user's code the error came from of which this process ends; else empty."""
    return _watched.place if _watched is not None else ""


class Once:
    """What is done once; another thread that wants it done waits until it is.

    Args:
        patience: seconds that it waits at most.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._begun = threading.Lock()
        self._thread = -1
        self._over = threading.Event()

    def begins(self) -> bool:
        """Whether it is the caller who does it."""
        if self._begun.acquire(blocking=False):
            self._thread = threading.get_ident()
            return True
        if self._thread != threading.get_ident():
            self._over.wait(self._patience)
        return False

    def is_over(self) -> None:
        """It is done."""
        self._over.set()


class _LastResort:
    """What a `SystemExit` carries that was raised while an error was handled.

    It dies with it: where no frame of Python's is left beneath, nobody has caught the exit.
    """

    def __init__(self, watched: _Watched, error: str, place: str) -> None:
        self._watched = watched
        self._error = error
        self._place = place

    def __del__(self) -> None:
        beneath = sys._getframe().f_back
        last = beneath is None or beneath.f_code is _BOOTSTRAP
        if last and threading.current_thread() is threading.main_thread():
            self._watched.handled = self._error
            self._watched.place = self._place


class _Watched:
    """The four ways in which this process can end while it can still report.

    Attributes:
        handled: the error that the process exits for, which was handled.
        place: where in the user's code the error came from; empty where that is not known.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._begun = threading.Lock()
        self._done = threading.Event()
        self.handled = ""
        self.place = ""
        self._previous_hook = sys.excepthook
        self._previous_exit = sys.exit
        self._reader: socket.socket | None = None
        self._writer: socket.socket | None = None
        sys.excepthook = self._excepthook
        sys.exit = self._exit
        atexit.register(self._at_exit)
        if multiprocessing.parent_process() is not None:
            # A process that `multiprocessing` made (`mp.spawn` does for many trainers) ends without
            # `atexit`. Before the sender's own, which has priority 0.
            multiprocessing.util.Finalize(None, self._at_exit, exitpriority=10)
        self._watch_sigterm()

    def close(self) -> None:
        if os.getpid() != self.pid:
            return
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._previous_hook
        if sys.exit == self._exit:
            sys.exit = self._previous_exit
        self._unwatch_sigterm()

    def report(self, state: str, error: str) -> None:
        """Sends all reports, once; waits for whoever does so already."""
        if os.getpid() != self.pid:
            return
        if not self._begun.acquire(blocking=False):
            # A crashing rank is also terminated by its launcher: let the crash be reported first.
            self._done.wait(5.0)
            return
        for report in tuple(_reports):
            report(state, error)
        self._done.set()

    @property
    def listens(self) -> bool:
        """Whether signals still wake the thread that listens for them; for the main thread."""
        descriptor = signal.set_wakeup_fd(-1)
        if descriptor != -1:
            signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        return self._writer is not None and descriptor == self._writer.fileno()

    @property
    def reporting(self) -> bool:
        """Whether the reports are being sent, or have been."""
        return self._begun.locked()

    def _at_exit(self) -> None:
        ended = _end_of_child()
        # An exit that was seen has said more than its code.
        if ended is not None and (_printed is not None or not self.handled):
            self.handled, self.place = ended
        self.report("failed" if self.handled else "finished", self.handled)

    def _exit(self, status: str | int | None = None, /) -> NoReturn:
        try:
            self._previous_exit(status)
        except SystemExit as leaving:
            error = leaving.__context__
            if status not in (None, 0):
                if error is None:
                    text, place = f"SystemExit: {status}"[:2000], place_of(threading.get_ident())
                else:
                    text, place = _text_of(error), place_of_error(error.__traceback__)
                # A copy is none: it dies where it is made.
                vars(leaving)["_rankscope"] = _LastResort(self, text, place)
            raise

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.place = place_of_error(trace)
        self.report("failed", _text_of(error))
        self._previous_hook(kind, error, trace)

    # ------------------------------------------------------------------------------------- SIGTERM

    def _watch_sigterm(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return  # the trainer, or its framework, handles it
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        if previous != -1:  # an event loop listens there
            signal.set_wakeup_fd(previous)
            reader.close()
            writer.close()
            return
        signal.signal(signal.SIGTERM, _wait_for_the_end)
        self._reader, self._writer = reader, writer
        threading.Thread(
            target=self._listen, args=(reader,), name="rankscope-signals", daemon=True
        ).start()

    def _unwatch_sigterm(self) -> None:
        if self._writer is None or self._reader is None:
            return
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
            if signal.getsignal(signal.SIGTERM) is _wait_for_the_end:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._writer.close()  # ends the listening thread, which closes its end
            self._reader = self._writer = None

    def _listen(self, reader: socket.socket) -> None:
        with reader:
            while received := reader.recv(64):
                # The trainer may have set a handler of its own since.
                ours = signal.getsignal(signal.SIGTERM) is _wait_for_the_end
                if signal.SIGTERM in received and ours:
                    self.report("failed", _TERMINATED)
                    _die_of_sigterm()


def _text_of(error: BaseException) -> str:
    # The message of a failed collective names what broke; the traceback stays with the user.
    return "".join(traceback.format_exception_only(error)).strip()[:2000]


def _wait_for_the_end(number: int, frame: FrameType | None) -> None:
    """Python's handler of SIGTERM, run by the main thread when it gets to it.

    The listening thread reports and ends the process; should it not, this does. An event loop takes
    the wake-up byte for itself and never gives it back: then that thread has not woken up. A main
    thread that is reporting itself goes on: it must not wait for itself.
    """
    watched = _watched
    if threading.get_ident() in _leaving:
        _leaving[threading.get_ident()] = True
        return
    if watched is not None and watched.reporting:
        return
    if watched is not None and not watched.listens:
        watched.report("failed", _TERMINATED)
    else:
        threading.Event().wait(5.0)
    _die_of_sigterm()


def _die_of_sigterm() -> None:
    # `signal.signal` works in the main thread only, which may be blocked: hence libc's.
    ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)
    os.kill(os.getpid(), signal.SIGTERM)


# ------------------------------------------------------------- processes that multiprocessing made

# Up to Python 3.12 these run their finalizers while the error is being handled; since 3.13
# afterwards, when it has been printed and dropped, and no hook has been called for it.
_BOOTSTRAP = cast(Any, BaseProcess)._bootstrap.__code__
_LAUNCH = cast(Any, Popen)._launch.__code__
# Text and place of the error that this process, one of them, has ended with.
_printed: tuple[str, str] | None = None
_plain_print_exc = traceback.print_exc


def _print_exc(*arguments: Any, **more: Any) -> None:
    """In place of `traceback.print_exc`, by which such a process prints what it ends with."""
    global _printed
    error, caller = sys.exception(), sys._getframe().f_back
    if error is not None and caller is not None and caller.f_code is _BOOTSTRAP:
        _printed = _text_of(error), place_of_error(error.__traceback__)
    _plain_print_exc(*arguments, **more)


def _end_of_child() -> tuple[str, str] | None:
    """Text and place of what such a process ends with; None where it is another one, or is done."""
    error = sys.exception()
    if multiprocessing.parent_process() is None:
        return None
    if isinstance(error, SystemExit):
        # One that leaves for an error that was handled leaves for that.
        error = None if error.code in (None, 0) else error.__context__ or error
    if error is not None:
        return _text_of(error), place_of_error(error.__traceback__)
    if _printed is None and (code := _code_of_child()):
        return f"exit code {code}", ""
    return _printed


def _code_of_child() -> int | None:
    """With which code such a forked process ends; None where it is another one, or not over."""
    frame = sys._getframe().f_back
    while frame is not None and frame.f_code is not _BOOTSTRAP:
        if frame.f_code is _LAUNCH:
            code = frame.f_locals.get("code")
            return code if isinstance(code, int) else None
        frame = frame.f_back
    return None


# ------------------------------------------------------------------------------- senders left open


class Closable(Protocol):
    """What is to be closed."""

    def close(self, state: str, error: str) -> None:
        """Sends or keeps what is left, and reports how the process ended."""

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
        if traceback.print_exc is not _print_exc:
            traceback.print_exc = _print_exc


def _start_anew_in_child() -> None:
    global _printed
    _printed = None
    _leaving.clear()
    if signal.getsignal(signal.SIGTERM) is _wait_for_the_end:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for one in list(_open):
        one.forget()


def _close_all() -> None:
    """Close what nobody closed, while threads still run."""
    error = sys.exc_info()[1]
    if error is None and not hasattr(sys, "ps1"):
        error = getattr(sys, "last_value", None)
    if error is None and (ended := _end_of_child()) is not None:
        state, text = "failed", ended[0]
    elif error is None or (isinstance(error, SystemExit) and not error.code):
        state, text = "finished", ""
    else:
        state, text = "failed", describe(error)
    for one in list(_open):
        one.close(state, text)


os.register_at_fork(after_in_child=_start_anew_in_child)
atexit.register(_close_all)
