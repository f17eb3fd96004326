"""Rolls up and merges what comes, in a thread that takes a small share of the time."""

from __future__ import annotations

import logging
import threading
import time

from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from rankscope.server.health import Failures, Health, Kept
from rankscope.server.storage.database.engine import reading
from rankscope.server.storage.maintenance.compaction import compact, runs_to_compact

_logger = logging.getLogger(__name__)

# Seconds between two checks for new rows: rows are rolled up together, and cost less.
_PERIOD = 5.0
# Part of the time that it may take: the machine has other things to do.
_SHARE = 0.15


class Compactor:
    """Compacts all runs that need it, one small step of each after the other.

    A run that cannot be compacted is left alone for a while, and holds up no other.

    Args:
        engine: the server's database.
        health: notified of failures, and that the thread is there.
        period: seconds between two checks.
        share: part of the time that it takes at most, above 0 and at most 1.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        health: Health | None = None,
        period: float = _PERIOD,
        share: float = _SHARE,
    ) -> None:
        self._engine = engine
        self._period = period
        self._pause = 1 / share - 1
        self._stopping = threading.Event()
        health = health or Health()
        self._failures = Failures("compaction", health)
        self._thread = Kept("compactor", self._work, health=health, stopping=self._stopping)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends after the step that is under way."""
        self._stopping.set()
        self._thread.join(30)

    def _work(self) -> None:
        while not self._stopping.wait(self._period):
            try:
                with reading(self._engine) as connection:
                    runs = runs_to_compact(connection)
            except SQLAlchemyError:
                # The database is away: what was not written is done again.
                _logger.exception("roll-ups wait for the database")
                continue
            self._failures.keep(runs)
            # A step of each in turn: a long run must not hold up the short ones.
            while runs and not self._stopping.is_set():
                runs = [run for run in runs if self._step(run)]

    def _step(self, run: int) -> bool:
        """One step for a run; True where there is more to do."""
        if self._stopping.is_set() or not self._failures.due(run):
            return False
        began = time.thread_time()
        more = False
        try:
            more = compact(self._engine, run)
            self._failures.succeeded(run)
        except OperationalError:
            _logger.exception("roll-ups wait for the database")
        except Exception as error:
            _logger.debug("run %d cannot be compacted", run, exc_info=True)
            self._failures.failed(run, f"run {run}", error)
        # Its own time only: what it waits for others is not what it takes from them.
        self._stopping.wait((time.thread_time() - began) * self._pause)
        return more
