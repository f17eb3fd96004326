"""Ends what takes far longer in a thread than it should: a run whose evaluation never returns."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# Seconds between two checks of the clock.
_CHECK_SECONDS = 0.5


class Overdue(BaseException):
    """What was under way has taken too long.

    No `Exception`: what contains those of a part must not go on with the next one.
    """


@dataclass(slots=True)
class _Job:
    thread: int
    clock: Callable[[], float]
    until: float


class Budget:
    """This many seconds of the processor for what one thread does, again and again.

    `Overdue` is raised between two instructions of Python; a single call into C is not cut short.
    Should it come a moment too late, it hits what the thread does next: that has to bear it. Where
    it gets lost (what a weak reference calls reports errors, and goes on), it is raised again after
    as many seconds.

    Args:
        seconds: of the thread's own processor time, where the system shows it; else by the clock.
            Time in which the machine did something else, or the database was waited for, says
            nothing about what was to be done.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._job: _Job | None = None

    @contextmanager
    def spent(self) -> Iterator[None]:
        """What is done within may take as long as the budget says.

        Raises:
            Overdue: it took longer.
        """
        clock = _clock_of(threading.get_ident())
        self._job = _Job(threading.get_ident(), clock, clock() + self.seconds)
        try:
            yield
        finally:
            self._job = None

    def watch(self, stopping: threading.Event) -> None:
        """Looks at the clock until `stopping` is set; in another thread."""
        while not stopping.wait(_CHECK_SECONDS):
            job = self._job
            if job is None:
                continue
            try:
                over = job.clock() >= job.until
            except OSError:
                continue  # the thread has ended
            if over and self._job is job:
                job.until = job.clock() + self.seconds
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(job.thread), ctypes.py_object(Overdue)
                )


def _clock_of(thread: int) -> Callable[[], float]:
    clock_id = getattr(time, "pthread_getcpuclockid", None)
    if clock_id is None:
        return time.monotonic
    number = clock_id(thread)
    return lambda: time.clock_gettime(number)
