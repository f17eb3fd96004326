"""Run events between servers on one PostgreSQL, by LISTEN and NOTIFY.

It only makes things faster: who hears nothing looks into the database now and then all the same.
Announcements go out after the commit, on a connection of their own and many runs at once: a NOTIFY
within a batch's transaction would make the commits of all servers wait for each other.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from sqlalchemy import Engine, text
from sqlalchemy.exc import SQLAlchemyError

from rankscope.server.health import Health, Kept
from rankscope.server.processes.events import RunEvents

_logger = logging.getLogger(__name__)

_CHANNEL = "rankscope_news"
# Announcements wait for others that long.
_GATHER_SECONDS = 0.02
# PostgreSQL takes 8,000 bytes; the name of a run has 250 characters, of up to 4 bytes each.
_MAX_BYTES = 7000
_POLL_SECONDS = 0.5
_MAX_BACKOFF_SECONDS = 10.0


class Messenger:
    """Notifies other servers of what happened here, and hears what happened there.

    Args:
        engine: on PostgreSQL; on anything else nothing is started, as there are no others.
    """

    def __init__(self, engine: Engine, run_events: RunEvents, health: Health | None = None) -> None:
        self._health = health or Health()
        self._engine = engine
        self._run_events = run_events
        self._name = secrets.token_hex(8)
        self._stopping = threading.Event()
        self._threads: list[Kept] = []

    def start(self) -> None:
        """Starts the threads."""
        if self._engine.dialect.name != "postgresql":
            return
        self._run_events.forwarding = True
        for name, work in (("listen", self._listen), ("forward", self._forward)):
            thread = Kept(
                name,
                partial(self._again_and_again, work),
                health=self._health,
                stopping=self._stopping,
            )
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Ends them."""
        self._stopping.set()
        self._run_events.outgoing.set()
        for thread in self._threads:
            thread.join(5)

    def _again_and_again(self, work: Callable[[], None]) -> None:
        import psycopg

        backoff = 0.5
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                work()
            except (SQLAlchemyError, psycopg.Error):
                if time.monotonic() - began > 60:
                    backoff = 0.5
                _logger.exception("no run events between servers; trying again in %.1f s", backoff)
                self._stopping.wait(backoff)
                backoff = min(2 * backoff, _MAX_BACKOFF_SECONDS)

    def _listen(self) -> None:
        # Not one of the pool: it would go back to it with what it listens to.
        connection = self._engine.raw_connection()
        driver: Any = connection.driver_connection  # detached it does not know it any more
        connection.detach()
        try:
            driver.autocommit = True
            driver.execute(f"LISTEN {_CHANNEL}")
            self._run_events.missed()
            while not self._stopping.is_set():
                for notice in driver.notifies(timeout=_POLL_SECONDS):
                    reported = json.loads(notice.payload)
                    if reported["from"] != self._name:
                        for run in reported["runs"]:
                            self._run_events.heard(run)
                    if self._stopping.is_set():
                        break
        finally:
            connection.close()

    def _forward(self) -> None:
        engine = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.detach()
            while not self._stopping.is_set():
                self._run_events.outgoing.wait()
                self._stopping.wait(_GATHER_SECONDS)
                for payload in self._payloads(sorted(self._run_events.collect())):
                    connection.execute(
                        text("SELECT pg_notify(:channel, :payload)"),
                        {"channel": _CHANNEL, "payload": payload},
                    )

    def _payloads(self, runs: Iterable[str]) -> Iterator[str]:
        part: list[str] = []
        size = 0
        for run in runs:
            length = len(json.dumps(run)) + 2
            if size + length > _MAX_BYTES and part:
                yield json.dumps({"from": self._name, "runs": part})
                part, size = [], 0
            part.append(run)
            size += length
        if part:
            yield json.dumps({"from": self._name, "runs": part})
