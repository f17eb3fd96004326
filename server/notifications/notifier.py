"""Tells targets of alerts, in a thread of its own: who does not answer holds up nobody."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, select
from sqlalchemy.exc import SQLAlchemyError

from rankscope.server.health import Health, Kept
from rankscope.server.notifications import cordon, transports
from rankscope.server.notifications.message import Message, News, link_to
from rankscope.server.notifications.transports import BadTarget, NotDelivered
from rankscope.server.notifications.what_to_send import (
    BETWEEN_S,
    FIRST_WAIT_S,
    retry_at,
    what_to_tell,
)
from rankscope.server.storage import schema
from rankscope.server.storage.database.engine import reading, writing
from rankscope.server.storage.judgement import alerts, notifications
from rankscope.server.storage.judgement.notifications import RESOLVED, Notification, Target
from rankscope.server.storage.reading import hosts
from rankscope.server.window import Alert

_logger = logging.getLogger(__name__)

# What another server wrote, or was due meanwhile, is looked for that often.
_PERIOD_S = 2.0
# Targets are told side by side, each of one thing at a time.
_AT_ONCE = 8
# Longer than any transport takes: a server that died while it told somebody is replaced then.
_CLAIM_S = 120.0
# Runs that were heard of so long ago are looked at when the server starts: it may have ended
# between an alert and its notification.
_LOOK_BACK_S = 86400.0
# Who forgets what is open is told that often.
_REMIND_S = transports.FORGETS_AFTER_S / 3

Deliver = Callable[[str, Message], None]


@dataclass(frozen=True, slots=True)
class _Parcel:
    """What one target is told of one run."""

    target: Target
    message: Message
    rows: tuple[Notification, ...]


class Notifier:
    """Tells targets what happens to alerts.

    Args:
        engine: the server's database.
        address: of the server, for links.
        health: notified of what fails, and that the thread is there.
        deliver: tells a target; raises `NotDelivered`.
        now: seconds since 1970.
        first_wait: seconds from an alert's opening until it is told.
        between: seconds between two messages to one target about one run, at the least.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        address: str,
        health: Health | None = None,
        deliver: Deliver = transports.deliver,
        now: Callable[[], float] = time.time,
        first_wait: float = FIRST_WAIT_S,
        between: float = BETWEEN_S,
    ) -> None:
        self._engine = engine
        self._address = address
        self._health = health or Health()
        self._deliver = deliver
        self._now = now
        self._first_wait = first_wait
        self._between = between
        self._lock = threading.Lock()
        self._changed: set[str] = set()
        self._known: frozenset[str] | None = None  # ids of targets when last looked
        self._under_way: dict[str, Future[None]] = {}
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="rankscope-tell")
        self._thread = Kept("notifier", self._work, health=self._health, stopping=self._stopping)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends it; what is under way has some seconds to come to its end."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(5)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def changed(self, run: str) -> None:
        """Something of a run was stored: its alerts may be others."""
        with self._lock:
            self._changed.add(run)

    def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                self.round()
            except SQLAlchemyError:
                _logger.exception("notifications wait for the database")
            self._wake.wait(_PERIOD_S)

    def round(self) -> list[Future[None]]:
        """Looks once at what has changed, and begins to tell what is due.

        Returns:
            What is under way now.
        """
        now = self._now()
        with reading(self._engine) as connection:
            targets = {t.id: t for t in notifications.targets(connection)}
            runs = self._to_look_at(connection, frozenset(targets), now)
        try:
            if targets:
                for run in sorted(runs):
                    self._want(run, targets.values(), now)
                    runs.discard(run)
        finally:
            if targets:
                with self._lock:
                    self._changed |= runs
        self._under_way = {t: f for t, f in self._under_way.items() if not f.done()}
        with reading(self._engine) as connection:
            due = notifications.due(connection, now=now)
        by_target: dict[str, dict[int, list[Notification]]] = defaultdict(lambda: defaultdict(list))
        for one in due:
            by_target[one.target][one.run].append(one)
        for target, of_runs in by_target.items():
            if target not in self._under_way:
                told = targets.get(target)
                self._under_way[target] = self._pool.submit(self._tell, target, told, of_runs)
        return list(self._under_way.values())

    def _to_look_at(self, connection: Connection, known: frozenset[str], now: float) -> set[str]:
        """Runs that have changed; with a new target, or at the start, all of the last time."""
        recent: set[str] = set()
        if known and (self._known is None or known - self._known):
            r = schema.run
            query = select(r.c.id).where(r.c.last_seen_at > now - _LOOK_BACK_S)
            recent.update(connection.scalars(query))
        self._known = known
        with self._lock:
            changed, self._changed = self._changed, set()
        return changed | recent

    def _want(self, run_id: str, targets: Iterable[Target], now: float) -> None:
        """Notes what each target is to be told of a run; a run that cannot be read stops no other.

        Mostly that is nothing: no transaction that writes is begun then, for which batches wait.
        """
        try:
            with reading(self._engine) as connection:
                run = _key(connection, run_id)
                if run is None:
                    return
                told = notifications.of_run(connection, run=run.key)
                new = self._new(connection, run, run_id, told, targets, now)
        except SQLAlchemyError:
            raise
        except Exception:
            self._health.count("notification_failures")
            _logger.exception("nobody is told of run %s until it changes again", run_id)
            return
        if not new:
            return
        with writing(self._engine) as connection:
            for target, alert_ids in new.items():
                last = max(
                    (t.told_at or 0.0 for (_, at), t in told.items() if at == target), default=0
                )
                notifications.want(
                    connection,
                    [(alert, target) for alert in alert_ids],
                    run=run.key,
                    due_at=max(now + self._first_wait, last + self._between),
                    now=now,
                )

    def _new(
        self,
        connection: Connection,
        run: Any,
        run_id: str,
        told: Mapping[tuple[str, str], Notification],
        targets: Iterable[Target],
        now: float,
    ) -> dict[str, list[str]]:
        """Ids of the alerts that each target, by id, is to be told something new of."""
        roots, quiet = _alerts(connection, run.key, run_id, now)
        new: dict[str, list[str]] = {}
        for target in targets:
            for alert in roots:
                before = told.get((alert.id, target.id))
                # Of what waits already, or was given up, nothing more is noted.
                if before is not None and before.wanted_at is not None:
                    continue
                what = what_to_tell(
                    alert, target, project=run.project, quiet=alert.id in quiet, before=before
                )
                if what and self._is_for(connection, run.key, target, alert, what):
                    new.setdefault(target.id, []).append(alert.id)
        return new

    def _is_for(
        self, connection: Connection, run: int, target: Target, alert: Alert, what: str
    ) -> bool:
        """Whether what is new of an alert is for a target: hooks are for those of hosts alone."""
        if not cordon.is_cordon(target.url):
            return True
        return what == "opened" and bool(_accused(connection, run, target, alert))

    def _tell(
        self, target_id: str, target: Target | None, of_runs: dict[int, list[Notification]]
    ) -> None:
        """Tells one target what is due, run by run; a hook alert by alert."""
        due = list(of_runs.items())
        if target is not None and cordon.is_cordon(target.url):
            due = [(run, [row]) for run, rows in due for row in rows]
        for run, rows in due:
            if self._stopping.is_set():
                return
            try:
                with writing(self._engine) as connection:
                    now = self._now()
                    until = now + _CLAIM_S
                    rows = [r for r in rows if notifications.claim(connection, r, until=until)]
                    parcel = (
                        None if target is None else self._parcel(connection, run, target, rows, now)
                    )
                    sent = () if parcel is None else parcel.rows
                    notifications.dropped(connection, [r for r in rows if r not in sent])
                if parcel is not None:
                    self._send(parcel)
            except Exception:
                # What is claimed is due again some minutes later; the other runs are told now.
                self._health.count("notification_failures")
                _logger.exception("telling %s of run %d failed: it is tried again", target_id, run)

    def _parcel(
        self,
        connection: Connection,
        run: int,
        target: Target,
        rows: list[Notification],
        now: float,
    ) -> _Parcel | None:
        """What there is to tell as things stand now; None where there is nothing any more."""
        found = connection.execute(
            select(schema.run.c.id, schema.run.c.project).where(schema.run.c.key == run)
        ).first()
        if found is None:
            return None
        roots, quiet = _alerts(connection, run, found.id, now)
        standing = {alert.id: alert for alert in roots}
        news: list[News] = []
        told: list[Notification] = []
        for row in rows:
            alert = standing.get(row.alert)
            if alert is None:
                continue
            what = what_to_tell(
                alert, target, project=found.project, quiet=alert.id in quiet, before=row
            )
            if not what and transports.is_forgetful(target.url) and _is_open(row, alert):
                what = "still"
            if what and self._is_for(connection, run, target, alert, what):
                news.append(News(alert, what))
                told.append(row)
        if not news:
            return None
        link = link_to(self._address, found.id)
        of_hosts = cordon.is_cordon(target.url)
        accused = _accused(connection, run, target, news[0].alert) if of_hosts else {}
        message = Message(found.id, found.project, link, tuple(news), accused)
        return _Parcel(target, message, tuple(told))

    def _send(self, parcel: _Parcel) -> None:
        error = ""
        try:
            self._deliver(parcel.target.url, parcel.message)
        except (NotDelivered, BadTarget) as why:
            error = str(why)
        except Exception as why:
            # A service's library may raise whatever it likes; it is noted and tried again as any
            # other failure.
            _logger.debug("%s cannot be told", parcel.target.name, exc_info=True)
            # Not what it says: addresses with their secrets are in such texts.
            error = type(why).__name__
        now = self._now()
        with writing(self._engine) as connection:
            for row, news in zip(parcel.rows, parcel.message.news, strict=True):
                if error:
                    again = retry_at(row, now=now)
                    notifications.failed(connection, row, error=error, again_at=again)
                    continue
                over = news.alert.state == RESOLVED
                remind = transports.is_forgetful(parcel.target.url) and not over
                notifications.told(
                    connection,
                    row,
                    what=RESOLVED if over else news.alert.severity,
                    now=now,
                    again_at=now + _REMIND_S if remind else None,
                )
        # What happened meanwhile was not noted, as something was due.
        self.changed(parcel.message.run)
        if error:
            self._health.count("notification_failures")
            _logger.warning(
                "%s cannot be told of run %s: %s", parcel.target.name, parcel.message.run, error
            )
        else:
            self._health.count("notifications")


def _key(connection: Connection, run_id: str) -> Any:
    """The run's `key` and `project`; None where there is none of that id."""
    r = schema.run
    return connection.execute(select(r.c.key, r.c.project).where(r.c.id == run_id)).first()


def _alerts(
    connection: Connection, run: int, run_id: str, now: float
) -> tuple[list[Alert], set[str]]:
    """The roots of a run, and which of them somebody wants to hear nothing of."""
    roots = alerts.roots(connection, run=run, run_id=run_id)
    silenced = {s.kind for s in alerts.silences(connection, run=run, now=now)}
    known = alerts.acknowledgements(connection, alert_ids=[a.id for a in roots], now=now)
    return roots, {a.id for a in roots if a.kind in silenced or a.id in known}


def _accused(
    connection: Connection, run: int, target: Target, alert: Alert
) -> dict[str, list[int]]:
    """Hosts that an alert accuses before a hook, with their ranks."""
    # Where the ranks were then: a restart may have brought them to other machines since.
    of_ranks = hosts.of_runs(connection, [run], until=alert.opened_at).get(run, {})
    return cordon.accused(alert, of_ranks, chosen=target.kinds is not None)


def _is_open(row: Notification, alert: Alert) -> bool:
    return row.told not in ("", RESOLVED) and alert.state != RESOLVED
