"""`rankscope serve --workers N`: several server processes behind one port.

They share the listening socket: a connection goes to whoever is free, and those that wait in it are
not lost with a process that dies. The process that starts them serves nothing itself. It starts
another one in the place of one that died, and ends them all when it is asked to end; should it be
killed itself, they notice, and end.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event
from types import FrameType
from typing import TypeAlias

from rankscope.server.settings import Settings

_logger = logging.getLogger(__name__)

Serve: TypeAlias = Callable[[Settings, socket.socket, Callable[[], None]], int]

# One that dies sooner than this after its start is started again only after a pause.
_SHORT_LIFE_S = 5.0
_MAX_PAUSE_S = 30.0
# When all have died without having served anything, it is not for want of trying again.
_HOPELESS = 3
_STOP_S = 20.0


def supervise(
    settings: Settings, listener: socket.socket, serve: Serve, started: Callable[[], None]
) -> int:
    """Runs `settings.workers` processes until SIGTERM or SIGINT.

    Args:
        serve: serves on the socket until it is asked to end, and calls its last argument when it
            has begun; a function of a module, as it is called in another process.
        started: called once the first of them serves.

    Returns:
        0 when they were asked to end, 1 where they would not start.
    """
    return _Supervisor(settings, listener, serve, started).run()


class _Worker:
    def __init__(self, process: SpawnProcess, ready: Event) -> None:
        self.process = process
        self.ready = ready
        self.started_at = time.monotonic()


class _Supervisor:
    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        serve: Serve,
        started: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._serve = serve
        self._started = started
        # A fresh interpreter each: a copy of this one would have its locks in whatever state.
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._stopping = threading.Event()
        self._ever_ready = False
        self._deaths = 0

    def run(self) -> int:
        # Signals interrupt no wait of Python's; a byte in this pipe does.
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        before_fd = signal.set_wakeup_fd(writer)
        before = {s: signal.signal(s, self._end) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            pause, start_at = 1.0, 0.0
            while not self._stopping.is_set():
                missing = self._settings.workers - len(self._workers)
                if missing and time.monotonic() >= start_at:
                    self._workers += [self._start() for _ in range(missing)]
                    missing = 0
                left = max(start_at - time.monotonic(), 0.05) if missing else None
                self._wait(reader, left)
                short = self._bury()
                if short is None:
                    continue
                if not self._ever_ready and self._deaths >= _HOPELESS * self._settings.workers:
                    _logger.error("no server process comes up; see what they said")
                    return 1
                pause = min(2 * pause, _MAX_PAUSE_S) if short else 1.0
                start_at = time.monotonic() + (pause if short else 0.0)
            return 0
        finally:
            self._stop_all()
            signal.set_wakeup_fd(before_fd)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(reader)
            os.close(writer)

    def _start(self) -> _Worker:
        ready = self._context.Event()
        process = self._context.Process(
            target=_work,
            args=(self._serve, self._settings, self._listener, ready),
            name="rankscope-server",
        )
        process.start()
        return _Worker(process, ready)

    def _wait(self, reader: int, timeout: float | None) -> None:
        """Until a process has died, a signal has come, or this many seconds have passed."""
        if not self._ever_ready:
            timeout = 0.05
        found = wait([reader, *(worker.process.sentinel for worker in self._workers)], timeout)
        if reader in found:
            os.read(reader, 4096)
        if not self._ever_ready and any(worker.ready.is_set() for worker in self._workers):
            self._ever_ready = True
            self._started()

    def _bury(self) -> bool | None:
        """Forgets who has died; whether one had lived for a moment only, None where none died."""
        dead = [worker for worker in self._workers if not worker.process.is_alive()]
        self._workers = [worker for worker in self._workers if worker not in dead]
        if not dead or self._stopping.is_set():
            return None
        self._deaths += len(dead)
        for worker in dead:
            _logger.error(
                "server process %s has ended (exit code %s); another one takes its place",
                worker.process.pid,
                worker.process.exitcode,
            )
        return any(time.monotonic() - worker.started_at < _SHORT_LIFE_S for worker in dead)

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._stopping.set()

    def _stop_all(self) -> None:
        for worker in self._workers:
            worker.process.terminate()
        deadline = time.monotonic() + _STOP_S
        for worker in self._workers:
            worker.process.join(max(deadline - time.monotonic(), 0.0))
            if worker.process.is_alive():
                _logger.error("server process %s does not end: killed", worker.process.pid)
                worker.process.kill()
                worker.process.join()


def _work(serve: Serve, settings: Settings, listener: socket.socket, ready: Event) -> None:
    """One of the processes."""
    # Ctrl-C in a terminal reaches all of them; the supervisor passes it on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, name="rankscope-parent", daemon=True).start()
    raise SystemExit(serve(settings, listener, ready.set))
