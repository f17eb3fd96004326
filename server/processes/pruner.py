"""Deletes what is no longer to be kept, in a thread that takes a small share of the time."""

from __future__ import annotations

import logging
import threading

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from rankscope.server.health import Health, Kept
from rankscope.server.storage.maintenance.pruning import delete_run
from rankscope.server.storage.maintenance.retention import Retention, Sizes, surplus

_logger = logging.getLogger(__name__)

# Rules speak of days: nobody notices ten minutes.
_PERIOD_S = 600.0
# Part of the time in which it may hold up what else is written.
_SHARE = 0.1


class Pruner:
    """Deletes runs by the rules of a server.

    Args:
        retention: the rules.
        health: notified that the thread is there, and of each run that went.
        period: seconds between two times that it asks what there is to delete.
        share: part of the time that it takes at most, above 0 and at most 1.
    """

    def __init__(
        self,
        engine: Engine,
        retention: Retention,
        *,
        health: Health | None = None,
        period: float = _PERIOD_S,
        share: float = _SHARE,
    ) -> None:
        self._engine = engine
        self._retention = retention
        self._period = period
        self._pause = 1 / share - 1
        self._sizes = Sizes()
        self._stopping = threading.Event()
        self._health = health or Health()
        self._thread = Kept("pruner", self._work, health=self._health, stopping=self._stopping)

    def start(self) -> None:
        """Starts the thread, where there are rules."""
        if self._retention:
            self._thread.start()

    def stop(self) -> None:
        """Ends after the transaction that is under way."""
        self._stopping.set()
        self._thread.join(30)

    def _work(self) -> None:
        # Not at once: a server that has been away for long first hears who still lives.
        while not self._stopping.wait(self._period):
            try:
                self._prune()
            except SQLAlchemyError:
                _logger.exception("old runs stay for the time being")
            except _Stopping:
                return

    def _prune(self) -> None:
        for run in surplus(self._engine, self._retention, self._sizes):
            if delete_run(self._engine, run.key, seconds=run.seconds, rest=self._rest):
                why = "the size of its project" if run.seconds is None else "its age"
                _logger.info("run %s of %s was deleted for %s", run.id, run.project, why)
                self._health.count("pruned_runs")

    def _rest(self, seconds: float) -> None:
        if self._stopping.wait(seconds * self._pause):
            raise _Stopping


class _Stopping(Exception):
    """What was begun is gone on with after the next start."""
