"""Rolls up and merges what comes, in a thread that takes a small share of the time."""

from __future__ import annotations

import logging
import threading
import time

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from rankscope.server.storage.compaction import compact, runs_to_compact
from rankscope.server.storage.engine import reading

_logger = logging.getLogger(__name__)

# Seconds between two looks at what has come: rows are rolled up together, and cost less.
_PERIOD = 5.0
# Part of the time that it may take: the machine has other things to do.
_SHARE = 0.15


class Compactor:
    """Compacts all runs that need it, one small step after the other.

    Args:
        engine: the server's database.
        period: seconds between two looks.
        share: part of the time that it takes at most, above 0 and at most 1.
    """

    def __init__(self, engine: Engine, *, period: float = _PERIOD, share: float = _SHARE) -> None:
        self._engine = engine
        self._period = period
        self._pause = 1 / share - 1
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="rankscope-compactor", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends after the step that is under way."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=30)

    def _work(self) -> None:
        while not self._stopping.wait(self._period):
            try:
                with reading(self._engine) as connection:
                    runs = runs_to_compact(connection)
                for run in runs:
                    self._compact(run)
            except SQLAlchemyError:
                # The database is away: what was not written is done again.
                _logger.exception("roll-ups wait for the database")

    def _compact(self, run: int) -> None:
        more = True
        while more and not self._stopping.is_set():
            began = time.thread_time()
            more = compact(self._engine, run)
            # Its own time only: what it waits for others is not what it takes from them.
            self._stopping.wait((time.thread_time() - began) * self._pause)
