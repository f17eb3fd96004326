"""The background thread that takes facts to the server: drains, batches, sends, closes."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from itertools import count
from typing import ClassVar

from rankscope.agent import wire
from rankscope.agent.delivery.batches import BatchMaker
from rankscope.agent.delivery.deliver import Counters, Delivery
from rankscope.agent.delivery.diagnostics import Diagnostics
from rankscope.agent.delivery.pace import Pace
from rankscope.agent.delivery.process_exit import close_at_exit_of_child, remember
from rankscope.agent.delivery.queue import BatchQueue
from rankscope.agent.delivery.records import Drained, Records
from rankscope.agent.delivery.spool import SpoolFolder, folder_of, folders_of_rank
from rankscope.agent.delivery.tensorboard import EventThread
from rankscope.agent.launcher import Identity
from rankscope.agent.options import Options
from rankscope.agent.process import frames

__all__ = ["Counters", "Sender"]

_log = logging.getLogger("rankscope")
# Batches made in one round; what is left waits for the next.
_BATCHES_A_ROUND = 20
# How long the training thread is let go on between two pieces of our work.
_PAUSE_SECONDS = 0.0005
# The part of the time for closing that is kept for writing to disk what could not be sent.
_TO_SPILL = 0.1


# Random text of each process that this one has been (a fork is another), and its sessions so far.
_sessions: dict[int, tuple[str, Iterator[int]]] = {}


def _new_session() -> str:
    """Text that no other sender of any process has.

    Those of one process begin alike, up to the dot: of a job that trains two models, one after the
    other, that indicates to the server that the second one is no launch of its own.
    """
    text, numbers = _sessions.setdefault(os.getpid(), (secrets.token_hex(8), count()))
    return f"{text}.{next(numbers)}"


class Sender:
    """Sends one rank's records, exactly once, whatever dies.

    Nothing here waits for the network on the caller's thread except `close`, and that one not
    longer than its timeout. A batch is kept until the server has acknowledged it: in memory while
    the server answers, on disk from the first failure on, so that a killed process leaves it to
    `rankscope sync` or to the process that takes its place. A forked child neither sends nor spools
    nor blocks.

    Args:
        records: what the training thread publishes.
        options: server, token, project, mode, spool and tensorboard are used.
        identity: place of this process in the job.
        hello: makes what is said of this process; called in the sender thread.
        phase: where the training thread was last seen; called in the sender thread.
        prepare: called in the sender thread before each drain.
        on_problem: called once for each kind of problem, with a sentence; by default it is logged.
        on_connected: called once, in the sender thread, when the server has first answered.
        session: random text of this process.
        pace: how often and how long.
    """

    HEARTBEAT_SECONDS: ClassVar[float] = Pace().heartbeat

    def __init__(
        self,
        records: Records,
        *,
        options: Options,
        identity: Identity,
        hello: Callable[[], wire.Hello],
        phase: Callable[[], str],
        prepare: Callable[[], None] = lambda: None,
        on_problem: Callable[[str], None] = _log.warning,
        on_connected: Callable[[], None] = lambda: None,
        session: str | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._records = records
        self._options = options
        self._identity = identity
        self._session = session or _new_session()
        self._pace = pace or Pace()
        self._pid = os.getpid()
        self._next_connect = 0.0
        self._diagnostics = Diagnostics(
            records,
            options,
            identity,
            step=lambda: max(self._batches.through_step, 0),
            on_problem=on_problem,
        )
        self._guard = self._diagnostics.guard
        # Batches must go on whatever happens, so this one is never disabled.
        self._rounds = self._guard.probe("sender", tolerance=sys.maxsize)
        self._prepare = self._guard.probe("prepare")(prepare)

        folder = folder_of(options.spool, identity.run, identity.rank, self._session)
        self._folders = [SpoolFolder(folder)]
        self._queue = BatchQueue(
            self._folders[0], lose=records.lose, on_fault=self._diagnostics.spool
        )
        # Held while records become batches and batches change place; never during a request.
        self._turn = threading.RLock()
        self._delivery = Delivery(
            self._queue,
            options.server if options.mode == "online" else None,
            options.token,
            pace=self._pace,
            turn=self._turn,
            report=self._diagnostics.report,
            on_connected=self._guard.probe("connected")(on_connected),
            uploader_faults=self._guard.probe("uploader"),
            on_uploader_lost=self._diagnostics.uploader_lost,
        )
        self._batches = BatchMaker(
            records,
            self._queue,
            self._delivery,
            options=options,
            identity=identity,
            session=self._session,
            pace=self._pace,
            hello=self._guard.probe("hello", tolerance=3)(hello),
            phase=self._guard.probe("phase")(phase),
            # What cannot be encoded is left out; the next batch is another one.
            encoder=self._guard.probe("encoder", tolerance=sys.maxsize),
            pause=self._let_others,
        )
        self._connect()
        self._events: EventThread | None = None
        self._next_batch = 0.0
        self._began = time.monotonic()
        self._going_on = False  # whether there were steps between the last two batches
        self._phase_of_host = zlib.crc32(socket.gethostname().encode()) / 2**32

        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._closing = threading.Lock()
        self._closed = threading.Event()
        self._final: tuple[str, str] | None = None
        self._deadline = self._last_post = float("inf")
        self._finished = False
        remember(self)

    # ------------------------------------------------------------------------- for other threads

    @property
    def dense_until(self) -> int | None:
        """Last step of the server's latest dense-sampling request; None before the first."""
        return self._delivery.dense_until

    @property
    def counters(self) -> Counters:
        """What became of what was published so far."""
        if os.getpid() != self._pid:
            return Counters()
        return self._delivery.counters(self._records.dropped)

    def say_hello_again(self) -> None:
        """What `hello` makes has changed: it goes out again with the next batch."""
        self._delivery.hello_wanted = True

    def start(self) -> None:
        """Start the thread; harmless where it runs already, and in a forked child."""
        if self._thread is not None or self._final is not None or os.getpid() != self._pid:
            return
        thread = threading.Thread(target=self._run, name="rankscope-sender", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # No thread can start any more (interpreter shutdown, limit of the system): `close`
            # then writes to the spool what was published.
            self._diagnostics.fault(
                "sender", "no thread can be started; what is recorded is spooled"
            )
            return
        self._thread = thread
        close_at_exit_of_child()

    def close(self, state: str = "finished", error: str = "", timeout: float = 5.0) -> None:
        """Send what is left with the final state, or leave it in the spool.

        May be called from any thread. Called again, it does nothing but wait for the first call to
        end; in a forked child it does nothing at all.

        Args:
            state: `finished` or `failed`.
            error: what it failed of.
            timeout: seconds after which it returns in any case.
        """
        if os.getpid() != self._pid:
            return
        if not self._closing.acquire(blocking=False):
            self._closed.wait(max(0.0, self._deadline - time.monotonic()))
            return
        now = time.monotonic()
        self._deadline = now + timeout
        self._last_post = now + timeout * (1 - _TO_SPILL)
        self._final = (state, error)
        self._wake.set()
        with self._guard.probe("uploader"):
            self._delivery.interrupt()
        thread = self._thread
        if thread is threading.current_thread():
            return
        if thread is not None:
            thread.join(timeout * (1 - _TO_SPILL / 2))
        # Either the thread is done, or there is none, or it is stuck in a request: then what it
        # has not sent is written to disk from here, the batch in question included. Should that
        # one have arrived after all, the server knows it again by its number.
        left = max(0.0, self._deadline - time.monotonic())
        if not self._finished:
            # One that waits for a server is no fault of ours.
            if thread is not None and thread.is_alive() and not self._delivery.posting:
                self._diagnostics.fault("sender", f"has not come back: it is {_place_of(thread)}")
            _within(left, self._finish_from_here)
        self._closed.set()

    # ------------------------------------------------------------------------------- sender thread

    def _run(self) -> None:
        with self._guard.probe("signals"):
            # A trainer may have given SIGPIPE its deadly default back, and servers go away.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
        with self._guard.probe("adopt"):
            self._adopt()
        while not self._finished:
            faults = self._rounds.faults
            with self._rounds:
                self._round()
            soonest = min(self._next_batch, self._delivery.next_try) - time.monotonic()
            # A round that fails must not become a busy loop.
            pause = max(soonest, 0.0) if self._rounds.faults == faults else self._pace.batch
            if not self._finished:
                self._rest(pause)

            if self._final is not None and self._rounds.faults != faults:
                # There is no next time: what can be saved is saved.
                with self._turn:
                    self._finish()
        # Whoever finished while this thread was in the middle of a request left it open.
        with self._rounds:
            self._delivery.close()

    def _rest(self, seconds: float) -> None:
        # Who closes sets this first and interrupts the listening then.
        if self._delivery.left and not self._wake.is_set():
            self._delivery.listen(seconds)
        else:
            self._wake.wait(seconds)

    def _finish_from_here(self) -> None:
        left = max(0.0, self._deadline - time.monotonic())
        if self._turn.acquire(timeout=left):
            try:
                self._finish(stuck=self._thread is not None and self._thread.is_alive())
            finally:
                self._turn.release()

    def _round(self) -> None:
        now = time.monotonic()
        if self._delivery.unprepared and (now >= self._next_connect or self._final is not None):
            # A process that is out of file descriptors for a moment has none to begin with.
            self._next_connect = now + self._pace.longest_backoff
            self._connect()
        if self._final is not None:
            self._collect()
            # Before the last batch, which can still report what fails there.
            self._close_events()
            with self._turn:
                self._batches.make_last(*(self._final or ("finished", "")))
            self._delivery.run(self._last_post, closing=True)
            with self._turn:
                self._finish()
            return
        self._delivery.settle()
        if now >= self._next_batch:
            self._next_batch = now + self._until_next_batch(now)
            self._collect()
        self._delivery.run(self._next_batch)

    def _until_next_batch(self, now: float) -> float:
        requested = self._delivery.dense_until
        dense = requested is not None and requested > self._batches.through_step
        often = dense or not self._going_on or now - self._began < self._pace.steady_after
        if self._delivery.away:
            # A server that is busy gets no more batches than one that is not.
            longer = not often and self._delivery.busy
            return self._pace.steady_batch if longer else self._pace.batch_away
        if often:
            return self._pace.batch
        # All ranks of a host at the same moments: they wait for each other, so that one step is
        # longer for all of their batches and not a step for each (Jones et al., "Improving the
        # Scalability of Parallel Jobs by Adding Parallel Awareness to the Operating System",
        # SC 2003). Hosts differ, for the server's sake.
        period = self._pace.steady_batch
        left = period - (time.time() - self._phase_of_host * period) % period
        return left if left > period / 2 else left + period

    def _adopt(self) -> None:
        """Take over what processes left that held this rank before and died."""
        if self._options.mode != "online":
            return
        identity = self._identity
        for folder in folders_of_rank(self._options.spool, identity.run, identity.rank):
            left = SpoolFolder(folder)
            if folder != self._folders[0].folder and left.acquire():
                with self._turn:
                    self._queue.adopt(left)
                    self._folders.append(left)

    def _collect(self) -> None:
        """Make batches of what was published."""
        self._prepare()
        before = self._batches.through_step
        for _ in range(_BATCHES_A_ROUND):
            with self._turn:
                drained = self._batches.make()
            self._write_events(drained)
            if not drained.more:
                break
        self._going_on = self._batches.through_step > before

    def _let_others(self) -> None:
        if self._final is None:
            time.sleep(_PAUSE_SECONDS)

    def _write_events(self, drained: Drained) -> None:
        if self._options.tensorboard is None or not drained.rows:
            return
        probe = self._guard.probe("tensorboard")
        if not probe.enabled:
            return
        with probe:
            if self._events is None:
                self._events = EventThread(self._options.tensorboard, self._identity.rank, probe)
            self._events.write(drained.rows)

    def _close_events(self) -> None:
        with self._guard.probe("tensorboard"):
            if self._events is not None:
                self._events.close()

    def _finish(self, *, stuck: bool = False) -> None:
        """Put what is left on disk and let go of everything; the turn is held.

        Args:
            stuck: the sender thread is in the middle of a request.
        """
        if self._finished:
            return
        self._finished = True
        self._delivery.stopped = True
        # One by one: what fails must not keep the others from being done.
        with self._rounds:
            self._batches.make_last(*(self._final or ("finished", "")))
        with self._rounds:
            self._queue.spill()
        with self._rounds:
            queue = self._queue
            self._diagnostics.left(
                lost=queue.waiting, kept=len(queue), disk_problem=queue.disk_problem
            )
        for folder in self._folders:
            with self._rounds:
                folder.close()
        if not stuck:
            with self._rounds:
                self._delivery.close()

    def _connect(self) -> None:
        # It cannot through a proxy of a kind that is not known, say.
        with self._guard.probe("connection", tolerance=sys.maxsize):
            self._delivery.connect()

    def forget(self) -> None:
        """Become harmless: this is a forked child, and everything here belongs to its parent."""
        self._records.stop()
        self._delivery.forget()
        for folder in self._folders:
            folder.forget_lock()


def _place_of(thread: threading.Thread) -> str:
    """Where a thread is, for a person."""
    for code, line, _ in frames.stack_of(thread.ident or 0)[:1]:
        return f"in {code.co_name} at {code.co_filename}:{line}"
    return "nowhere"


def _within(seconds: float, what: Callable[[], None]) -> None:
    """Does something that may hang on a disk, and goes on without it after so long."""
    thread = threading.Thread(target=what, name="rankscope-last", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # At the interpreter's shutdown no thread starts any more.
        what()
        return
    thread.join(seconds)
