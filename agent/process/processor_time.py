"""How long a thread ran, and how long it was ready to and had no processor: what Linux counts."""

from __future__ import annotations

import contextlib
import os
import threading


class ProcessorTime:
    """The counters of the thread that reads them (`/proc/thread-self/schedstat`).

    A reading is one system call, about a microsecond. The file is opened at the first one, and
    anew by another thread and after a fork; the kernel makes it up, so that no disk is waited for.
    """

    def __init__(self) -> None:
        self._file = -1
        self._thread = -1

    def read(self) -> tuple[tuple[int, int] | None, bool]:
        """Nanoseconds (running, waiting for a processor), and whether they go on from the last.

        None where the system has no such counters.
        """
        thread = threading.get_native_id()
        same = thread == self._thread
        if not same:
            self.close()
            self._thread = thread
            # Other systems have no such file.
            with contextlib.suppress(OSError):
                self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        if self._file < 0:
            return None, same
        ran, waited, _ = os.pread(self._file, 64, 0).split()
        return (int(ran), int(waited)), same

    def close(self) -> None:
        """Closes the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._thread = -1
