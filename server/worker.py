"""The evaluation loop: loads what is new, aligns, compares, detects, and keeps the alerts."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from sqlalchemy import Connection, Engine

from rankscope.server import detectors
from rankscope.server.alerts import causes, lifecycle
from rankscope.server.alerts.model import Alert
from rankscope.server.align import Aligner, lives_since
from rankscope.server.detectors.base import Check
from rankscope.server.detectors.runner import Evaluation
from rankscope.server.storage import comparisons, evaluation
from rankscope.server.storage.engine import reading, writing
from rankscope.server.storage.evaluation import Life, NewData, RunRow
from rankscope.server.window import Window

_logger = logging.getLogger(__name__)

# Silence is noticed at this pace; new data wake the loop at once.
_INTERVAL_S = 1.0
# A loop that was itself away for longer than this (a suspended machine) has heard nobody meanwhile.
_PAUSE_S = 5.0
# Runs kept in memory; one more is rebuilt from the database when it has news.
_MAX_RUNS = 256
_MAX_BACKOFF_S = 60.0
# How long dense sampling is asked for after something was found, in steps.
_DENSE_STEPS = 20
_MAX_AHEAD = 2000
# A run all of whose ranks have said nothing for this long is not running.
_LOST_SECONDS = 30.0


class Worker:
    """Evaluates runs in a thread of its own.

    Args:
        wake: set when a batch has been stored.
        now: the server's clock, seconds since 1970.
        strict: a fault of a detector is raised instead of contained; for tests.
    """

    def __init__(
        self,
        engine: Engine,
        wake: threading.Event,
        *,
        now: Callable[[], float] = time.time,
        strict: bool = False,
    ) -> None:
        self._engine = engine
        self._wake = wake
        self._now = now
        self._strict = strict
        self._runs: OrderedDict[int, _Run] = OrderedDict()
        self._retries: dict[int, tuple[float, float]] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        # Nobody could be heard before now.
        self._listening_since = self._looked_at = now()

    def start(self) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._loop, name="rankscope-worker", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the run it is at."""
        self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=30)

    def _loop(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(_INTERVAL_S)
            self._wake.clear()
            try:
                self.look()
            except Exception:
                # One bad moment of the database must not end the loop.
                _logger.exception("evaluation failed; trying again")
                self._stopping.wait(_INTERVAL_S)

    def look(self) -> None:
        """Evaluates every run that has news or still runs, once."""
        now = self._now()
        if now - self._looked_at > _PAUSE_S:
            self._listening_since = now
        self._looked_at = now
        with reading(self._engine) as connection:
            rows = evaluation.runs_to_evaluate(connection, now=now)
        for row in rows:
            retry_at, backoff = self._retries.get(row.key, (0.0, 1.0))
            if self._stopping.is_set() or now < retry_at:
                continue
            try:
                try:
                    self._run(row).evaluate(row, now, self._listening_since)
                except _Renumbered:
                    self._runs.pop(row.key)
                    self._run(row).evaluate(row, now, self._listening_since)
                self._retries.pop(row.key, None)
            except Exception:
                if self._strict:
                    raise
                # What is in memory may be half done: it is built again from the database.
                self._runs.pop(row.key, None)
                self._retries[row.key] = (now + backoff, min(2 * backoff, _MAX_BACKOFF_S))
                _logger.exception("run %s: evaluation failed, again in %.0f s", row.id, backoff)
        self._looked_at = self._now()

    def _run(self, row: RunRow) -> _Run:
        run = self._runs.get(row.key)
        if run is None:
            run = self._runs[row.key] = _Run(self._engine, row, strict=self._strict)
            while len(self._runs) > _MAX_RUNS:
                self._runs.popitem(last=False)
        self._runs.move_to_end(row.key)
        return run


class _Renumbered(Exception):
    """What is in memory has attempts by numbers that they have no more.

    An earlier process's words came after a later one's, from the disk.
    """


class _Run:
    """One run in memory: what its evaluation has come to.

    It begins before the first step and reads everything there is: detectors are folds, so that the
    same data end in the same state, and alerts have ids that follow from the data.
    """

    def __init__(self, engine: Engine, row: RunRow, *, strict: bool) -> None:
        self._engine = engine
        self._key = row.key
        self._id = row.id
        self._evaluation = Evaluation(detectors.build(), strict=strict)
        self._aligner = Aligner(self._evaluation.needs)
        self._alerts: dict[str, Alert] = {}
        self._checks: dict[str, Check] = {}
        self._arrival = 0
        # Number of each process.
        self._attempts: dict[tuple[int, str], int] = {}
        # Alerts for which dense sampling was asked for: once each, so as not to slow a job down
        # for as long as it is apart. A replay asks again, which costs a few steps.
        self._looked_into: set[str] = set()
        # What an evaluation before this one left, until the replay has caught up with it.
        self._stored: dict[str, Alert] | None = None

    def evaluate(self, row: RunRow, now: float, listening_since: float) -> None:
        more = True
        while more:
            with reading(self._engine) as connection:
                if self._stored is None:
                    stored = evaluation.load_alerts(connection, run=self._key)
                    self._stored = {alert.id: alert for alert in stored}
                    self._alerts = {alert.id: alert for alert in lifecycle.carried(stored)}
                data = evaluation.load_new(
                    connection,
                    run=self._key,
                    after=self._arrival,
                    metrics=self._aligner.metrics,
                    stages=self._aligner.stages,
                )
            more = data.more
            for entry in data.lives:
                known = (entry.life.rank, entry.session)
                if self._attempts.setdefault(known, entry.attempt) != entry.attempt:
                    raise _Renumbered
            self._page(row, data, now, listening_since)

    def _page(self, row: RunRow, data: NewData, now: float, listening_since: float) -> None:
        lives = lives_since(data.lives, listening_since)
        self._aligner.add(replace(data, lives=lives))
        reported = {entry.life.rank: entry.life.last_step for entry in data.lives}
        news = data.arrival > self._arrival
        changed: dict[str, Alert] = {}
        transitions: list[tuple[str, int, float, str, str]] = []
        compared: list[Window] = []
        checks = self._checks
        for window in self._aligner.windows(now):
            compared.append(window)
            findings, checks = self._evaluation.advance(window)
            folded = lifecycle.fold(
                tuple(self._alerts.values()),
                findings,
                run=self._id,
                through_step=window.last_step,
                now=now,
                heard_at={entry.life.rank: entry.life.last_seen for entry in data.lives},
                reported=reported,
            )
            for alert in folded.alerts:
                self._alerts[alert.id] = changed[alert.id] = alert
            transitions += folded.transitions
            before = tuple(self._alerts.values())
            linked = causes.link(before)
            transitions += causes.transitions(
                before, linked, through_step=window.last_step, now=now
            )
            for alert in linked:
                self._alerts[alert.id] = changed[alert.id] = alert
        if self._stored and not data.more:
            folded = lifecycle.unconfirmed(
                tuple(self._stored.values()),
                tuple(self._alerts.values()),
                through_step=self._aligner.last_step,
                now=now,
            )
            changed |= {alert.id: alert for alert in folded.alerts}
            transitions += folded.transitions
        changed = {alert.id: self._as_it_was(alert) for alert in changed.values()}
        if not data.more:
            self._stored = {}
        state = _ended(row, lives, now)
        stale = {kind: c for kind, c in checks.items() if self._checks.get(kind) != c}
        if news or changed or stale or state:
            with writing(self._engine) as connection:
                for window in compared:
                    comparisons.write_comparisons(
                        connection, run=self._key, comparisons=window.comparisons
                    )
                evaluation.save_alerts(
                    connection,
                    run=self._key,
                    alerts=tuple(changed.values()),
                    transitions=transitions,
                )
                evaluation.save_checks(connection, run=self._key, checks=stale)
                self._ask_dense(connection, changed, newest=max(reported.values(), default=-1))
                evaluation.mark_evaluated(
                    connection,
                    run=self._key,
                    arrival=data.arrival,
                    last_step=self._aligner.last_step,
                    late=self._aligner.late,
                    given_up=self._aligner.given_up,
                )
                if state:
                    evaluation.set_state(
                        connection, run=self._key, state=state, arrival=data.arrival
                    )
        self._checks = checks
        self._arrival = data.arrival

    def _as_it_was(self, alert: Alert) -> Alert:
        """A replayed alert with the times of its first life."""
        stored = (self._stored or {}).get(alert.id)
        if stored is None:
            return alert
        resolved = alert.state == "resolved" and stored.resolved_at is not None
        return replace(
            alert,
            opened_at=stored.opened_at,
            resolved_at=stored.resolved_at if resolved else alert.resolved_at,
        )

    def _ask_dense(self, connection: Connection, changed: dict[str, Alert], *, newest: int) -> None:
        """A closer look at what has just come apart: which tensor, and does it grow.

        The wish reaches a rank with the answer to its next batch. By then a fast trainer is
        hundreds of steps further, about as many as it was ahead when this was found.

        Args:
            newest: last step that any rank has reported.
        """
        fresh = [
            alert
            for alert in changed.values()
            if alert.kind.startswith(("desync.", "reduction.", "gradient.accumulating"))
            and alert.state == "open"
            and alert.id not in self._looked_into
        ]
        self._looked_into |= {alert.id for alert in fresh}
        if fresh:
            ahead = newest - max(alert.seen_step for alert in fresh)
            until = newest + _DENSE_STEPS + min(3 * max(ahead, 0), _MAX_AHEAD)
            evaluation.ask_dense(connection, run=self._key, until_step=until)


def _ended(row: RunRow, lives: tuple[Life, ...], now: float) -> str | None:
    """The state of a run whose ranks have all ended or fallen silent; None while one lives."""
    if row.state != "running" or not lives:
        return None
    silent = 0
    for life in (entry.life for entry in lives):
        if life.state == "running":
            patience = max(_LOST_SECONDS, 10 * life.typical_gap, 3 * life.longest_gap)
            if now - life.last_seen < patience:
                return None
            silent += 1
    if not silent:
        return None  # the last one's own word has decided
    return "failed" if any(entry.life.state == "failed" for entry in lives) else "lost"
