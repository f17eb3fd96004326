"""The runs that this process evaluates, of all there are: it renews its row and takes leases."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Collection

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from rankscope.server.health import Health, Kept
from rankscope.server.storage.database.engine import reading, writing
from rankscope.server.storage.judgement import leases
from rankscope.server.storage.judgement.leases import Lease

_logger = logging.getLogger(__name__)

# How often others' runs are examined: whether they are free.
_CHECK_SECONDS = 0.5
# A run is left to the server that should take it for so long; then whoever sees it does.
_POLITE_SECONDS = 2.0


class Leases:
    """The leases of one server process.

    Attributes:
        server: its random name.
    """

    def __init__(self, engine: Engine, health: Health | None = None) -> None:
        self._engine = engine
        self._health = health or Health()
        self.server = secrets.token_hex(8)
        self._leases: dict[int, Lease] = {}
        # Runs of others, and since when they have been free; 0 while they are not.
        self._others: dict[int, float] = {}
        self._checked_at = 0.0
        self._beaten_at = 0.0
        self._wanted_at = -math.inf
        self._beating = threading.Lock()
        self._stopping = threading.Event()
        self._thread: Kept | None = None
        # On SQLite there are no others to share with: an idle server writes nothing.
        self._shares = engine.dialect.name != "sqlite"

    def start(self) -> None:
        """Starts to record that this server is alive, in a thread: evaluations may take long."""
        self._thread = Kept("lease", self._loop, health=self._health, stopping=self._stopping)
        self._thread.start()

    def stop(self) -> None:
        """Gives everything back, for others to take at once."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(10)
        with self._beating:
            if self._beaten_at:
                with writing(self._engine) as connection:
                    leases.leave(connection, server=self.server)
            self._leases.clear()

    def of(self, runs: Collection[int]) -> dict[int, Lease]:
        """The leases of those of some runs that are this server's, with all that it could take."""
        missing = [run for run in runs if run not in self._leases]
        now = time.monotonic()
        if runs:
            self._wanted_at = now
            self._beat_if_due()
        fresh = any(run not in self._others for run in missing)
        if missing and (fresh or now - self._checked_at >= _CHECK_SECONDS):
            self._checked_at = now
            self._take(missing, now)
        return {run: self._leases[run] for run in runs if run in self._leases}

    def lost(self, run: int) -> None:
        """Another server has it, as it turned out."""
        self._leases.pop(run, None)
        self._others[run] = 0.0

    def give_back(self, run: int) -> None:
        """Whoever sees that the run has new data may take it."""
        lease = self._leases.pop(run, None)
        if lease is not None:
            with writing(self._engine) as connection:
                leases.release(connection, lease)

    def _take(self, missing: Collection[int], now: float) -> None:
        with reading(self._engine) as connection:
            living = leases.living(connection) | {self.server}
            held = leases.holders(connection, runs=missing)
        free = [run for run in missing if held.get(run) not in living]
        since = {run: self._others.get(run) or now for run in free}
        # Runs that are over are asked for no more.
        self._others = {run: since.get(run, 0.0) for run in missing}
        for run in free:
            mine = leases.preferred(run, living) == self.server
            if mine or now - since[run] >= _POLITE_SECONDS:
                with writing(self._engine) as connection:
                    lease = leases.take(connection, run=run, server=self.server)
                if lease is not None:
                    self._leases[run] = lease
                    del self._others[run]

    def _beat_if_due(self) -> None:
        with self._beating:
            now = time.monotonic()
            due = not self._beaten_at or now - self._beaten_at >= leases.BEAT_SECONDS
            if due and not self._stopping.is_set():
                with writing(self._engine) as connection:
                    leases.beat(connection, server=self.server)
                self._beaten_at = now

    def _loop(self) -> None:
        while not self._stopping.is_set():
            wanted = time.monotonic() - self._wanted_at < leases.SECONDS
            if self._shares or wanted:
                try:
                    self._beat_if_due()
                except SQLAlchemyError:
                    _logger.exception("cannot record that this server is alive; trying again")
            self._stopping.wait(leases.BEAT_SECONDS / 2)
