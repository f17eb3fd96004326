"""What a server does beside answering: it evaluates runs, tells of alerts, compacts what is stored.

Python lets one thread of a process run at a time. Within the process that takes batches, a step
that is compared is time in which none is taken, and a page waits for both. So a server by itself
does this work in a second process on the same database, and starts another one should that die.
Of several servers on one database, and of tests, each does it in threads of its own.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Any, Protocol

from sqlalchemy import Engine
from sqlalchemy.engine import make_url

from rankscope.server import clock
from rankscope.server.evaluation.worker import Worker
from rankscope.server.health import Health, Kept
from rankscope.server.notifications import transports
from rankscope.server.notifications.notifier import Notifier
from rankscope.server.processes.compactor import Compactor
from rankscope.server.processes.events import RunEvents
from rankscope.server.processes.otlp_metrics import MetricsExporter
from rankscope.server.processes.postgres_listen import Messenger
from rankscope.server.processes.pruner import Pruner
from rankscope.server.settings import Settings
from rankscope.server.storage.database.engine import open_engine

_logger = logging.getLogger(__name__)

# What it is called where it is missing.
_PROCESS = "evaluation"
# Run events wait for others that long: of many ranks' posts one message is made.
_GATHER_S = 0.005
# Longer than a worker takes to keep what it knows.
_STOP_S = 15.0
# One that dies is missed at once, one that always dies is not to keep the machine busy.
_FIRST_PAUSE_S, _MAX_PAUSE_S, _SHORT_LIFE_S = 1.0, 30.0, 60.0


class Background(Protocol):
    """Evaluation, notifications and compaction."""

    def start(self) -> None:
        """Begins; returns at once."""

    def stop(self) -> None:
        """Ends what is under way, and keeps what it knows."""


def background(
    settings: Settings, engine: Engine, run_events: RunEvents, health: Health
) -> Background:
    """The background work of a server with these settings, where they say that it is done.

    Args:
        engine: the server's database.
        run_events: is notified of what the work has changed, and notifies it of what has come.
        health: is notified of what fails, and of what is missing.
    """
    if settings.background == "process":
        return BackgroundProcess(settings, run_events, health)
    return BackgroundThreads(settings, engine, run_events, health)


class BackgroundThreads:
    """In threads of this process."""

    def __init__(
        self, settings: Settings, engine: Engine, run_events: RunEvents, health: Health
    ) -> None:
        self._compactor = Compactor(engine, health=health)
        self._pruner = Pruner(engine, settings.retention, health=health)
        self._notifier = Notifier(
            engine,
            address=settings.address,
            now=clock.now,
            health=health,
            deliver=partial(transports.deliver, commands=settings.cordon_commands),
        )
        self._run_events = run_events
        self._worker = (
            Worker(
                engine,
                run_events.wake,
                now=clock.now,
                notify=self._changed,
                given=settings.detectors,
                health=health,
            )
            if settings.evaluate
            else None
        )
        self._exporter = (
            MetricsExporter(
                engine, settings.otlp, server=self._worker.server, health=health, now=clock.now
            )
            if settings.otlp and self._worker is not None
            else None
        )

    def start(self) -> None:
        """Starts the threads."""
        self._compactor.start()
        self._pruner.start()
        if self._worker is not None:
            self._notifier.start()
            self._worker.start()
        if self._exporter is not None:
            self._exporter.start()

    def stop(self) -> None:
        """Ends them."""
        if self._exporter is not None:
            self._exporter.stop()
        if self._worker is not None:
            self._worker.stop()
            self._notifier.stop()
        self._pruner.stop()
        self._compactor.stop()

    def _changed(self, run: str) -> None:
        self._run_events.changed(run)
        self._notifier.changed(run)


class BackgroundProcess:
    """In a process of its own, which ends with this one."""

    def __init__(self, settings: Settings, run_events: RunEvents, health: Health) -> None:
        self._settings = settings
        self._run_events = run_events
        self._health = health
        self._stopping = threading.Event()
        self._thread = Kept("background", self._keep, health=health, stopping=self._stopping)
        # A fresh interpreter: a copy of this one would have its locks in whatever state.
        self._context = multiprocessing.get_context("spawn")

    def start(self) -> None:
        """Starts it, and a thread that starts another one should it die."""
        self._thread.start()

    def stop(self) -> None:
        """Has it end."""
        self._stopping.set()
        self._run_events.outgoing.set()
        self._thread.join(2 * _STOP_S)

    def _keep(self) -> None:
        pause = _FIRST_PAUSE_S
        while not self._stopping.is_set():
            began = time.monotonic()
            process, link = self._spawn()
            link.forward_until(self._stopping)
            if self._stopping.is_set():
                link.end()
                _bury(process)
                return
            self._health.missing(_PROCESS, "the process has ended")
            self._health.receive({})
            process.join(_STOP_S)
            # Who ends a group of processes ends this one a moment later.
            if self._stopping.wait(pause):
                return
            if self._run_events.stopping.is_set():
                self._stopping.wait()
                return
            self._health.count("background_restarts")
            _logger.error(
                "the evaluation's process %s has ended (exit code %s); another one takes its place",
                process.pid,
                process.exitcode,
            )
            short = time.monotonic() - began < _SHORT_LIFE_S
            pause = min(2 * pause, _MAX_PAUSE_S) if short else _FIRST_PAUSE_S

    def _spawn(self) -> tuple[SpawnProcess, _Link]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_work, args=(self._settings, theirs), name="rankscope-background", daemon=True
        )
        process.start()
        theirs.close()  # so that its death is the end of the pipe
        link = _Link(ours, self._run_events, forwards=_by_pipe(self._settings), heard=self._heard)
        return process, link

    def _heard(self, report: dict[str, Any]) -> None:
        """The process reports on itself: first, that it works."""
        self._health.receive(report)
        self._health.there(_PROCESS)


def _bury(process: SpawnProcess) -> None:
    process.join(_STOP_S)
    if process.is_alive():
        _logger.error("the evaluation's process %s does not end: killed", process.pid)
        process.kill()
        process.join()


class _Link:
    """Run events that two processes pass to each other.

    Args:
        pipe: to the other one.
        forwards: whether run events go through it; if not, its end and its health are all that is
            reported.
        health: sent to the other one, now and with each change.
        heard: called with what the other one reports of its health.
    """

    def __init__(
        self,
        pipe: Connection,
        run_events: RunEvents,
        *,
        forwards: bool,
        health: Health | None = None,
        heard: Callable[[dict[str, Any]], None] = lambda report: None,
    ) -> None:
        self._pipe = pipe
        self._run_events = run_events
        self._forwards = forwards
        self._health = health
        self._heard = heard
        self._unwell = threading.Event()
        if health is not None:
            health.changed = self._health_changed
            self._unwell.set()
        self._over = threading.Event()
        if self._forwards:
            run_events.forwarding = True
        self._thread = threading.Thread(target=self._listen, name="rankscope-link", daemon=True)
        self._thread.start()

    def forward_until(self, stopping: threading.Event) -> None:
        """Sends what there is to send, until `stopping` is set or nobody listens any more."""
        while not (stopping.is_set() or self._over.is_set()):
            if self._health is not None and self._unwell.is_set():
                self._unwell.clear()
                self._send({"health": self._health.report()})
            if not self._forwards:
                # Checked now and then: neither of the two can be waited for together.
                self._over.wait(0.2)
                continue
            self._run_events.outgoing.wait()
            stopping.wait(_GATHER_S)
            self._send(sorted(self._run_events.collect()))

    def end(self) -> None:
        """Has the other one end."""
        self._send(None)
        self._thread.join(_STOP_S)

    def _health_changed(self) -> None:
        self._unwell.set()
        self._run_events.outgoing.set()

    def _send(self, reported: list[str] | dict[str, Any] | None) -> None:
        if reported == []:
            return
        try:
            self._pipe.send_bytes(json.dumps(reported).encode())
        except OSError:
            self._over.set()

    def _listen(self) -> None:
        try:
            while (reported := json.loads(self._pipe.recv_bytes())) is not None:
                if isinstance(reported, dict):
                    self._heard(reported["health"])
                    continue
                for run in reported:
                    self._run_events.heard(run)
        except (EOFError, OSError):
            _logger.debug("the other process is gone")
        finally:
            self._over.set()
            self._run_events.outgoing.set()


def _by_pipe(settings: Settings) -> bool:
    """Whether processes on the database do not hear of each other through it."""
    return make_url(settings.database).get_backend_name() == "sqlite"


class _Ended(Exception):
    """The process was asked to end by a signal."""


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Ended


def _work(settings: Settings, pipe: Connection) -> None:
    """The other process."""
    # Ctrl-C in a terminal reaches both; the server passes it on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    engine = open_engine(settings.database)
    run_events = RunEvents()
    messenger = Messenger(engine, run_events)
    messenger.start()
    health = Health()
    threads = BackgroundThreads(settings, engine, run_events, health)
    threads.start()
    try:
        signal.signal(signal.SIGTERM, _end)
        link = _Link(pipe, run_events, forwards=_by_pipe(settings), health=health)
        link.forward_until(threading.Event())
    except _Ended:
        _logger.debug("asked to end by a signal")
    threads.stop()
    messenger.stop()
    engine.dispose()
