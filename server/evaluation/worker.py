"""The evaluation loop: looks for what is new in the runs that are this server's."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from rankscope.server.evaluation.baselines import Library
from rankscope.server.evaluation.budget import Budget, Overdue
from rankscope.server.evaluation.detector_settings import Given
from rankscope.server.evaluation.leases import Leases
from rankscope.server.evaluation.run import Renumbered, RunEvaluation
from rankscope.server.evaluation.sort_keys import keep_due
from rankscope.server.health import Failures, Health, Kept
from rankscope.server.storage.database import partitions
from rankscope.server.storage.database.engine import reading
from rankscope.server.storage.judgement import evaluation
from rankscope.server.storage.judgement.evaluation import RunRow
from rankscope.server.storage.judgement.leases import Lease, Lost

_logger = logging.getLogger(__name__)

# Silence is noticed at this pace; new data wake the loop at once.
_INTERVAL_S = 1.0
# Between two sweeps the others, who take batches, have the processor for this many times as long as
# the last sweep took: of many ranks' posts each sweep finds more, and costs little more for that.
_REST = 2.0
_MAX_REST_S = 0.25
# A run without new data is evaluated no more often than this, however often others wake the loop.
_QUIET_S = 0.5
# A loop that was itself away for longer than this (a suspended machine) has heard nobody meanwhile.
_PAUSE_S = 5.0
# Runs kept in memory; one more goes on from its snapshot when it has new data.
_MAX_RUNS = 256
# Of a run that has much to catch up with, this much is done before it is the others' turn; a run
# that has not got through the next part of it after this much processor time never will.
_SLICE_S = 0.5
_BUDGET_S = 60.0
# How often partitions are made for the runs to come, where tables have any.
_EXTEND_S = 3600.0
# At the end, snapshots are made for this long; the runs that are left are replayed.
_SAVE_S = 3.0


class Worker:
    """Evaluates runs in a thread of its own.

    Args:
        wake: set when a batch has been stored.
        now: the server's clock, seconds since 1970.
        strict: a fault of a detector is raised instead of contained; for tests.
        notify: called with the id of a run whose alerts or state have changed.
        given: settings of the detectors that the server was given.
        health: notified of failures, and that the threads are there.
        budget: seconds of the processor after which a run's evaluation is ended.
    """

    def __init__(
        self,
        engine: Engine,
        wake: threading.Event,
        *,
        now: Callable[[], float] = time.time,
        strict: bool = False,
        notify: Callable[[str], None] = lambda run: None,
        given: Given | None = None,
        health: Health | None = None,
        budget: float = _BUDGET_S,
    ) -> None:
        self._given = given or Given()
        self._engine = engine
        self._wake = wake
        self._now = now
        self._strict = strict
        self._notify = notify
        health = health or Health()
        self._health = health
        self._leases = Leases(engine, health)
        self._library = Library()
        self._runs: OrderedDict[int, RunEvaluation] = OrderedDict()
        self._failures = Failures("evaluation", health, clock=now)
        self._budget = Budget(budget)
        # When each run was last evaluated, and since when it is this server's.
        self._seen_at: dict[int, float] = {}
        self._taken_at: dict[int, float] = {}
        self._stopping = threading.Event()
        self._thread: Kept | None = None
        # Nobody could be heard before now.
        self._listening_since = self._swept_at = now()

    @property
    def server(self) -> str:
        """Random name of this server, under which it holds its runs."""
        return self._leases.server

    def start(self) -> None:
        """Starts the thread."""
        self._leases.start()

        def kept(name: str, work: Callable[[], None]) -> Kept:
            thread = Kept(name, work, health=self._health, stopping=self._stopping)
            thread.start()
            return thread

        kept("watchdog", lambda: self._budget.watch(self._stopping))
        self._thread = kept("worker", self._loop)

    def stop(self) -> None:
        """Ends the thread, keeps what it knows, and leaves the runs to others at once."""
        self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(30)
            if self._thread.alive:
                return  # what it is at goes on until the process ends; its lease then lapses
        try:
            self._save()
            self._leases.stop()
            for run in self._runs.values():
                self._notify(run.id)
        except SQLAlchemyError:
            _logger.exception("the database is away; others take over when this server is missed")

    def _save(self) -> None:
        deadline = time.monotonic() + _SAVE_S
        # Those that had new data last first.
        for run in reversed(self._runs.values()):
            if time.monotonic() >= deadline:
                return
            self._save_one(run)

    def _save_one(self, run: RunEvaluation) -> None:
        try:
            run.save()
        except Lost:
            _logger.info("run %d is evaluated elsewhere", run.lease.run)

    def _loop(self) -> None:
        extend_at = 0.0
        while not self._stopping.is_set():
            if time.monotonic() >= extend_at:
                extend_at = time.monotonic() + _EXTEND_S
                try:
                    partitions.extend(self._engine)
                except SQLAlchemyError:
                    _logger.exception("no partitions could be made for runs to come")
            self._wake.wait(_INTERVAL_S)
            self._wake.clear()
            began = time.monotonic()
            try:
                if self.sweep(_SLICE_S):
                    self._wake.set()
                self._stopping.wait(min(_REST * (time.monotonic() - began), _MAX_REST_S))
            except Exception:
                # One bad moment of the database must not end the loop.
                _logger.exception("evaluation failed; trying again")
                self._stopping.wait(_INTERVAL_S)

    def sweep(self, slice_s: float = math.inf) -> bool:
        """Evaluates every run of this server's that has new data or still runs, once.

        Args:
            slice_s: seconds after which it is the next run's turn.

        Returns:
            Whether a run has more to catch up with.
        """
        more = False
        now = self._now()
        if now - self._swept_at > _PAUSE_S:
            self._listening_since = now
        self._swept_at = now
        with reading(self._engine) as connection:
            rows = evaluation.runs_to_evaluate(connection, now=now)
        held = self._leases.of([row.key for row in rows])
        followed, fresh, quiet = self._turns(rows, now)
        for turn in (followed, fresh, quiet):
            until = time.monotonic() + (math.inf if turn is followed else slice_s)
            for number, row in enumerate(turn):
                if self._stopping.is_set():
                    break
                if number and time.monotonic() > until:
                    more |= turn is fresh
                    break
                lease = held.get(row.key)
                if lease is not None and self._failures.due(row.key):
                    more |= self._attend(row, lease, now, slice_s)
        self._forget({row.key for row in rows})
        more |= keep_due(self._engine, now)
        self._swept_at = self._now()
        return more

    def _turns(
        self, rows: Sequence[RunRow], now: float
    ) -> tuple[list[RunRow], list[RunRow], list[RunRow]]:
        """Runs that were evaluated before and have new data; new runs; those that may be silent.

        However many runs come at once, or never end, none that is followed waits for more than a
        part of the others. Who is nearly up to date does not wait for who has much to catch up
        with, and who has been looked at last comes last. Of new runs those of which most has come
        are first: a job of many ranks does not wait for a thousand trials that said one thing.
        """
        seen = self._seen_at
        followed = [r for r in rows if r.key in seen and r.arrivals > r.evaluated]
        fresh = [r for r in rows if r.key not in seen]
        quiet = [
            r
            for r in rows
            if r.key in seen and r.arrivals == r.evaluated and not 0 <= now - seen[r.key] < _QUIET_S
        ]
        fresh.sort(key=lambda row: row.evaluated - row.arrivals)
        followed.sort(key=lambda row: row.arrivals - row.evaluated)
        quiet.sort(key=lambda row: seen[row.key])
        return followed, fresh, quiet

    def _attend(self, row: RunRow, lease: Lease, now: float, slice_s: float) -> bool:
        """Evaluates a run; whether it has more to catch up with. What fails, fails alone."""
        began = time.monotonic()
        more = False
        try:
            with self._budget.spent():
                more = self._evaluate(row, lease, now, slice_s)
            self._seen_at[row.key] = now
            self._failures.succeeded(row.key)
        except Lost:
            self._runs.pop(row.key, None)
            self._leases.lost(row.key)
            _logger.warning("run %s: another server has taken it over", row.id)
        except (Exception, Overdue) as error:
            if self._strict:
                raise
            # What is in memory may be half done: it is built again from the database.
            self._runs.pop(row.key, None)
            took = time.monotonic() - began
            self._failures.failed(row.key, f"run {row.id}", error, took=took)
        return more

    def _evaluate(self, row: RunRow, lease: Lease, now: float, slice_s: float) -> bool:
        # Whoever posted to a server that died could not be heard until another took over.
        since = max(self._listening_since, self._taken_at.get(row.key, 0.0))
        try:
            return self._run(row, lease, now).evaluate(row, now, since, slice_s)
        except Renumbered:
            self._runs.pop(row.key)
            try:
                return self._run(row, lease, now, resume=False).evaluate(row, now, since, slice_s)
            except Renumbered:
                # Again, while it was read: at the next sweep.
                self._runs.pop(row.key)
                return True

    def _run(self, row: RunRow, lease: Lease, now: float, *, resume: bool = True) -> RunEvaluation:
        run = self._runs.get(row.key)
        if run is not None and run.lease != lease:
            run = None  # it was another server's in between
        if run is None:
            run = self._runs[row.key] = RunEvaluation(
                self._engine,
                row,
                lease,
                strict=self._strict,
                notify=self._notify,
                stopping=self._stopping,
                resume=resume,
                given=self._given,
                library=self._library,
            )
            if lease.number > 1 and self._taken_at.get(row.key) is None:
                self._taken_at[row.key] = now
            while len(self._runs) > _MAX_RUNS:
                self._save_one(self._runs.popitem(last=False)[1])
        self._runs.move_to_end(row.key)
        return run

    def _forget(self, wanted: set[int]) -> None:
        """What is noted of runs that need no evaluation goes, but for those in memory."""
        for noted in (self._seen_at, self._taken_at):
            for key in [key for key in noted if key not in wanted]:
                del noted[key]
        self._failures.keep(wanted)
