"""What the evaluation of one run has come to, and how it goes on: align, compare, detect, keep."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from sqlalchemy import Connection, Engine

from rankscope.server import detectors
from rankscope.server.alerts import causes, lifecycle
from rankscope.server.detectors.runner import Evaluation
from rankscope.server.detectors.settings import Effective
from rankscope.server.evaluation import dense_sampling, end_of_run, snapshot
from rankscope.server.evaluation.align import WATCHED_LAYERS, Aligner
from rankscope.server.evaluation.baselines import Learning, Library
from rankscope.server.evaluation.detector_settings import Given, for_project
from rankscope.server.evaluation.judged_until import MAX_LAG
from rankscope.server.storage.database.engine import reading, writing
from rankscope.server.storage.judgement import (
    comparisons,
    detector_settings,
    evaluation,
    leases,
    snapshots,
    sort_keys,
)
from rankscope.server.storage.judgement.evaluation import RunRow
from rankscope.server.storage.judgement.leases import Lease
from rankscope.server.storage.judgement.liveness import LivenessReader, liveness_since
from rankscope.server.window import Alert, Baselines, Check, NewData, Window

_logger = logging.getLogger(__name__)

# A snapshot is made after this many seconds of work, and when that was this many times what it
# costs: who takes over has that much to do again, and it slows the evaluation down by that share at
# most.
_SNAPSHOT_WORK_S = 1.0
_SNAPSHOT_SHARE = 50.0
# Batches of the first part of what there is to catch up with, and of any; and what a part is to
# take, in seconds.
_FIRST_BATCHES, _MOST_BATCHES, _PART_S = 64, 2000, 0.25
# How long baselines are read before it is the turn of another run, in seconds.
_READING_S = 0.1


class Renumbered(Exception):
    """What is in memory is of processes that are counted otherwise now.

    An earlier process's digests came after a later one's, from the disk, so that attempts have
    other numbers; or the whole job was launched again and begins anew.
    """


@dataclass(slots=True)
class _Memory:
    """All that is remembered of a run: what a snapshot consists of.

    Attributes:
        start: number of the job's start that it is of, and the arrival that this began with.
        arrival: newest arrival that has been evaluated.
        attempts: number of each process, by rank and session.
        sampled_densely: alerts for which dense sampling was requested: once each, so as not to slow
            a job down for as long as its ranks differ. A replay asks again, which costs a few
            steps.
        baselines: what the run is held against; None before they have been read.
    """

    detectors: Evaluation
    aligner: Aligner
    alerts: dict[str, Alert]
    checks: dict[str, Check]
    arrival: int
    attempts: dict[tuple[int, str], int]
    sampled_densely: set[str]
    start: tuple[int, int] = (0, 0)
    baselines: Baselines | None = None


@dataclass(slots=True)
class _Changes:
    """What the evaluation of new data has come to, before it is written.

    Attributes:
        alerts: those that are to be written, by id.
        transitions: of their states.
        compared: the windows that were judged.
        checks: those that say something else than before.
        state: of the run, where it has changed.
    """

    alerts: dict[str, Alert] = field(default_factory=dict)
    transitions: list[tuple[str, int, float, str, str]] = field(default_factory=list)
    compared: list[Window] = field(default_factory=list)
    checks: dict[str, Check] = field(default_factory=dict)
    state: str | None = None

    def take(self, folded: lifecycle.Folded) -> None:
        self.alerts |= {alert.id: alert for alert in folded.alerts}
        self.transitions += folded.transitions


@dataclass(slots=True)
class _Part:
    """How much of a run that has much to catch up with is read and evaluated at once.

    A batch may hold one step or thousands, so that only the last part shows what the next one will
    take: others wait for as long, and no part is interrupted.

    Attributes:
        batches: of the next part, at most.
    """

    batches: int = _FIRST_BATCHES

    def took(self, seconds: float, *, more: bool) -> None:
        """Adapts to what the last part took; one that was the last of its run says nothing."""
        if seconds > _PART_S:
            self.batches = max(1, int(self.batches * _PART_S / seconds))
        elif more and seconds < _PART_S / 2:
            self.batches = min(2 * self.batches, _MOST_BATCHES)


class RunEvaluation:
    """One run in memory.

    It goes on where a snapshot of the same code was made, or begins before the first step and reads
    everything there is: detectors are folds, so that the same data end in the same state, and
    alerts have ids that follow from the data.

    Args:
        lease: every transaction that writes makes sure of it.
        notify: called after a transaction that changed what users see.
        stopping: ends a long replay between two pages.
        resume: whether to look for a snapshot.
        given: settings of the detectors that the server was given.
        library: curves of earlier runs that have been read.
    """

    def __init__(
        self,
        engine: Engine,
        row: RunRow,
        lease: Lease,
        *,
        strict: bool = False,
        notify: Callable[[str], None] = lambda run: None,
        stopping: threading.Event | None = None,
        resume: bool = True,
        given: Given | None = None,
        library: Library | None = None,
    ) -> None:
        self._given = given or Given()
        self._learning = Learning(library or Library())
        self._project = row.project
        self._engine = engine
        self._key = row.key
        self.id = row.id
        self.lease = lease
        self._strict = strict
        self._notify = notify
        self._stopping = stopping or threading.Event()
        self._resume = resume
        self._memory = self._blank(None)
        self._liveness = LivenessReader()
        # What the run is judged by, until that is kept with it.
        self._fresh_settings: Effective | None = None
        # What an evaluation before this one left, until this one has caught up with it; and what
        # those of other starts of the job left.
        self._stored: dict[str, Alert] | None = None
        self._past: tuple[Alert, ...] = ()
        # Whether checks and comparisons are there that may be those of another start.
        self._stale = False
        self._evaluated_before = -1
        self._pace = dense_sampling.Pace()
        self._part = _Part()
        # Seconds of work since the last snapshot, and what the last one cost.
        self._work = self._cost = 0.0
        self._since = time.perf_counter()

    def evaluate(
        self, row: RunRow, now: float, listening_since: float, slice_s: float = math.inf
    ) -> bool:
        """Evaluates what is new, as much as there is time for.

        Args:
            slice_s: seconds after which it returns with what is done.

        Returns:
            Whether there is more.

        Raises:
            Renumbered: what is in memory is of no use any more; begin again without a snapshot.
            leases.Lost: another server evaluates the run.
        """
        self._since = time.perf_counter()
        deadline = self._since + slice_s
        more = True
        while more and not self._stopping.is_set():
            began = time.perf_counter()
            with reading(self._engine) as connection:
                if self._stored is None:
                    self._begin(connection)
                if not self._learn(connection, row, began + _READING_S):
                    return True
                data = evaluation.load_new(
                    connection,
                    run=self._key,
                    after=self._memory.arrival,
                    limit=self._part.batches,
                    metrics=self._memory.aligner.metrics,
                    stages=self._memory.aligner.stages,
                    known=self._liveness,
                    layers=WATCHED_LAYERS,
                    beyond=self._memory.aligner.last_step - MAX_LAG,
                )
            more = data.more
            if data.start != self._memory.start:
                raise Renumbered
            for entry in data.liveness:
                known = (entry.liveness.rank, entry.session)
                if self._memory.attempts.setdefault(known, entry.attempt) != entry.attempt:
                    raise Renumbered
            self._take(row, data, now, listening_since)
            self._count_work()
            self._part.took(self._since - began, more=more)
            if self._since >= deadline:
                break
        return more

    def save(self) -> None:
        """Makes a snapshot, if there has been work since the last one: this process ends.

        Raises:
            leases.Lost: another server evaluates the run.
        """
        if not self._work or self._stored is None:
            return
        if (state := snapshot.to_bytes(self._memory)) is not None:
            with writing(self._engine) as connection:
                leases.hold(connection, self.lease)
                self._keep(connection, state)

    def _blank(self, settings: Effective | None) -> _Memory:
        judges = Evaluation(
            detectors.build(settings),
            settings=settings,
            failures=detectors.installed().failures,
            strict=self._strict,
        )
        return _Memory(judges, Aligner(judges.needs), {}, {}, 0, {}, set())

    def _begin(self, connection: Connection) -> None:
        stored = evaluation.load_alerts(connection, run=self._key)
        # A run is judged by the settings that held when it was first examined: evaluated again, it
        # says the same, whatever was set meanwhile.
        kept_settings = detector_settings.load_run(connection, run=self._key)
        if kept_settings is None:
            judged_by = for_project(connection, self._given, self._project)
            self._fresh_settings = judged_by
        else:
            judged_by = Effective.from_json(kept_settings)
        self._memory = self._blank(judged_by)
        start = evaluation.current_start(connection, run=self._key)
        self._memory.start = start
        self._memory.arrival = max(start[1] - 1, 0)
        resumed = False
        kept = snapshots.load(connection, run=self._key, version=snapshot.version())
        if kept is not None and self._resume:
            try:
                self._memory = snapshot.from_bytes(kept)
                resumed = True
            except snapshot.Unreadable:
                _logger.exception("run %s is evaluated again from its start", self.id)
        number = self._memory.start[0]
        self._past = tuple(alert for alert in stored if alert.start != number)
        stored = [alert for alert in stored if alert.start == number]
        carried = lifecycle.carried(stored)
        if resumed:
            # What sees the clock alone does not come of the data again.
            carried = tuple(a for a in stored if a.kind in lifecycle.TIME_BASED)
        self._memory.alerts |= {alert.id: alert for alert in carried}
        self._stored = {alert.id: alert for alert in stored}
        self._evaluated_before = evaluation.evaluated_step(connection, run=self._key)
        self._stale = not resumed and (number > 0 or bool(self._past) or not self._resume)

    def _learn(self, connection: Connection, row: RunRow, until: float) -> bool:
        """Reads what the run is held against, a part of it each time; whether that is all."""
        while self._memory.baselines is None:
            self._memory.baselines = self._learning.advance(
                connection,
                key=self._key,
                run=self.id,
                project=self._project,
                world_size=row.world_size,
                config=row.config,
            )
            if time.perf_counter() > until:
                break
        return self._memory.baselines is not None

    def _count_work(self) -> None:
        now = time.perf_counter()
        self._work += now - self._since
        self._since = now

    def _snapshot(self) -> bytes | None:
        """The memory as bytes, when it is time for that and it is not too large."""
        self._count_work()
        if self._work < max(_SNAPSHOT_WORK_S, _SNAPSHOT_SHARE * self._cost):
            return None
        made = snapshot.to_bytes(self._memory)
        self._cost = time.perf_counter() - self._since
        self._work = 0.0
        return made

    def _keep(self, connection: Connection, state: bytes) -> None:
        began = time.perf_counter()
        snapshots.save(
            connection,
            run=self._key,
            version=snapshot.version(),
            arrival=self._memory.arrival,
            state=state,
        )
        self._cost += time.perf_counter() - began

    def _take(self, row: RunRow, data: NewData, now: float, listening_since: float) -> None:
        """Evaluates what has been loaded, and writes what comes of it."""
        memory = self._memory
        liveness = liveness_since(data.liveness, listening_since)
        reported = {entry.liveness.rank: entry.liveness.last_step for entry in data.liveness}
        self._pace.take(max(reported.values(), default=-1), liveness, now)
        memory.aligner.add(replace(data, liveness=liveness))
        changes = _Changes()
        self._judge(data, reported, now, changes)
        self._end_unconfirmed(data, now, changes)
        changes.take(lifecycle.ended_by_start(self._past, start=memory.start[0], now=now))
        changes.state = end_of_run.state_of(row, liveness, now, memory.checks)
        # Steps may be complete without new data: a rank is waited for no longer.
        judged = any(len(window.steps) for window in changes.compared)
        changed = data.arrival > memory.arrival or judged or self._stale
        memory.arrival = data.arrival
        if changed or changes.alerts or changes.checks or changes.state:
            self._write(row, data, changes, now)

    def _judge(
        self, data: NewData, reported: dict[int, int], now: float, changes: _Changes
    ) -> None:
        """Gives the detectors what has become complete, and keeps what they find as alerts."""
        memory, checks = self._memory, self._memory.checks
        for aligned in memory.aligner.windows(now):
            window = replace(aligned, baselines=memory.baselines)
            changes.compared.append(window)
            findings, checks = memory.detectors.advance(window)
            folded = lifecycle.fold(
                tuple(memory.alerts.values()),
                findings,
                run=self.id,
                through_step=window.last_step,
                now=now,
                heard_at={entry.liveness.rank: entry.liveness.last_seen for entry in data.liveness},
                reported=reported,
                world_size=window.world_size,
                start=memory.start[0],
            )
            changes.take(folded)
            memory.alerts |= {alert.id: alert for alert in folded.alerts}
            before = tuple(memory.alerts.values())
            linked = {alert.id: alert for alert in causes.link(before)}
            changes.transitions += causes.transitions(
                before, tuple(linked.values()), through_step=window.last_step, now=now
            )
            changes.alerts |= linked
            memory.alerts |= linked
        changes.checks = {kind: c for kind, c in checks.items() if memory.checks.get(kind) != c}
        memory.checks = checks

    def _end_unconfirmed(self, data: NewData, now: float, changes: _Changes) -> None:
        """Alerts that an evaluation before this one has left, and that are not found again."""
        if self._stored and not data.more:
            folded = lifecycle.unconfirmed(
                tuple(self._stored.values()),
                tuple(self._memory.alerts.values()),
                through_step=self._memory.aligner.last_step,
                now=now,
            )
            changes.take(folded)
        changes.alerts = {a.id: self._as_it_was(a) for a in changes.alerts.values()}
        if not data.more:
            self._stored = {}

    def _write(self, row: RunRow, data: NewData, changes: _Changes, now: float) -> None:
        """In one transaction; users are notified after it."""
        memory = self._memory
        unclear = dense_sampling.unclear(changes.alerts.values(), memory.sampled_densely)
        memory.sampled_densely |= {alert.id for alert in unclear}
        kept = self._snapshot()
        with writing(self._engine) as connection:
            leases.hold(connection, self.lease)
            if self._fresh_settings is not None:
                judged_by = self._fresh_settings.to_json()
                detector_settings.save_run(connection, run=self._key, settings=judged_by)
            if self._stale:
                evaluation.forget(connection, run=self._key)
            for window in changes.compared:
                comparisons.write_comparisons(
                    connection, run=self._key, comparisons=window.comparisons
                )
            evaluation.save_alerts(
                connection,
                run=self._key,
                alerts=tuple(changes.alerts.values()),
                transitions=changes.transitions,
                evaluated_before=self._evaluated_before,
            )
            evaluation.save_checks(connection, run=self._key, checks=changes.checks)
            if unclear:
                until = self._pace.sampled_until(unclear)
                evaluation.ask_dense(connection, run=self._key, until_step=until)
            evaluation.mark_evaluated(
                connection,
                run=self._key,
                arrival=data.arrival,
                # What is evaluated again was evaluated all the same.
                last_step=max(memory.aligner.last_step, self._evaluated_before),
                late=memory.aligner.late,
                given_up=memory.aligner.given_up,
            )
            if changes.state:
                evaluation.set_state(
                    connection, run=self._key, state=changes.state, arrival=data.arrival
                )
            if changes.alerts or changes.state or row.state != "running":
                sort_keys.ask(connection, run=self._key)
            else:
                sort_keys.ask_later(connection, run=self._key, now=now)
            if kept is not None:
                self._keep(connection, kept)
        self._fresh_settings, self._past, self._stale = None, (), False
        if changes.alerts or changes.state:
            self._notify(self.id)

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
