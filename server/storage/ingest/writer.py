"""Batches of many ranks in one transaction: the disk is waited for once for all of them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heapreplace

from sqlalchemy import Engine

from rankscope.agent import wire
from rankscope.server import clock
from rankscope.server.health import Health, Kept, Sparingly
from rankscope.server.storage.database.engine import is_unable, why, writing
from rankscope.server.storage.ingest.batches import check, store_batches
from rankscope.server.storage.ingest.dictionary import Dictionaries

_logger = logging.getLogger(__name__)

# Of a transaction: the longer it is the longer the others wait.
_MAX_BATCHES = 256
# How long one should take, seconds: many times what a disk takes to commit it, and too short to be
# noticed by an agent.
_SHOULD_TAKE_S = 0.1
# What storing costs, seconds of one core of a small cloud machine, on SQLite: each transaction,
# each run of which there are batches in it, more if it is new, each batch, fingerprint, and point.
_COMMIT_S = 2e-3
_RUN_S, _NEW_RUN_S, _BATCH_S, _FINGERPRINT_S, _POINT_S = 8e-4, 2e-3, 1e-4, 1e-4, 5e-8
# How many times as long it takes here is measured on the way: about the mean of ten transactions.
_GAIN = 0.1
# Runs that are remembered as known.
_MAX_KNOWN = 10_000
# What all runs are called together of which nothing has been stored.
_NEW = ""


class Closed(RuntimeError):
    """The writer takes no more batches."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    batch: wire.Batch
    received_at: float
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[wire.Answer]


_Outcome = tuple[asyncio.Future[wire.Answer], wire.Answer | Exception]


class Writer:
    """Stores what comes while it is busy with what came before, in a thread of its own.

    One batch alone is stored at once; under load the transactions grow by themselves.
    """

    def __init__(self, engine: Engine, health: Health | None = None) -> None:
        self._engine = engine
        self._known = Dictionaries()
        # By run, and those of new runs together; who waits longest comes first.
        self._queues: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        self._stored: OrderedDict[str, None] = OrderedDict()
        self._slowness = 1.0
        self._arrived = threading.Condition()
        self._closed = False
        self._stopping = threading.Event()
        self._health = health or Health()
        self._failures = Sparingly()
        self._thread = Kept("writer", self._work, health=self._health, stopping=self._stopping)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Takes no more, and ends when all that was taken is stored."""
        with self._arrived:
            self._closed = True
            self._stopping.set()
            self._arrived.notify()
        self._thread.join(30)

    def knows(self, run: str) -> bool:
        """Whether anything of a run has been stored by this process, lately."""
        return run in self._stored

    async def store(self, batch: wire.Batch) -> wire.Answer:
        """Stores a batch; returns when it is committed.

        Raises:
            wire.WireError: the database has no room for a number or a name in it.
            Closed: the server is about to end.
        """
        check(batch)
        loop = asyncio.get_running_loop()
        waiting = _Waiting(batch, clock.now(), loop, loop.create_future())
        with self._arrived:
            if self._closed:
                raise Closed
            flow = batch.run if self.knows(batch.run) else _NEW
            self._queues.setdefault(flow, deque()).append(waiting)
            self._arrived.notify()
        return await waiting.answer

    def _work(self) -> None:
        while group := self._next():
            outcomes: Sequence[wire.Answer | Exception]
            try:
                outcomes = self._outcomes(group)
            except BaseException:
                # The thread ends, and another one goes on: nobody is to wait for this one's answer.
                self._answer(group, [RuntimeError("the writer has ended")] * len(group))
                raise
            self._answer(group, outcomes)

    def _answer(self, group: list[_Waiting], outcomes: Sequence[wire.Answer | Exception]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[_Outcome]] = {}
        for waiting, outcome in zip(group, outcomes, strict=True):
            by_loop.setdefault(waiting.loop, []).append((waiting.answer, outcome))
        for loop, reported in by_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver, reported)
            except RuntimeError:
                # Its loop has ended, and with it all who waited: the batches are stored.
                _logger.debug("nobody waits for %d answers any more", len(reported))

    def _next(self) -> list[_Waiting]:
        """What waits, as much as a transaction takes; empty at the end.

        Each run gets an equal part of its time, and all new runs together that of one: whoever
        has little to store does not wait for whoever has much, nor for however many.
        """
        with self._arrived:
            while not self._queues and not self._closed:
                self._arrived.wait()
            group: list[_Waiting] = []
            runs: set[str] = set()
            served: set[str] = set()
            left = _SHOULD_TAKE_S / self._slowness - _COMMIT_S
            # How much of the time each has had; who has had least is next.
            turns = [(0.0, n, flow) for n, flow in enumerate(self._queues)]
            while turns and len(group) < _MAX_BATCHES and (left > 0 or not group):
                spent, n, flow = turns[0]
                queue = self._queues[flow]
                one = queue.popleft()
                group.append(one)
                served.add(flow)
                cost = self._cost(one.batch, runs)
                left -= cost
                if queue:
                    heapreplace(turns, (spent + cost, n, flow))
                else:
                    heappop(turns)
                    del self._queues[flow]
            # Of many runs, those that had no turn are first the next time.
            for _, _, flow in turns:
                if flow in served:
                    self._queues.move_to_end(flow)
            return group

    def _cost(self, batch: wire.Batch, runs: set[str]) -> float:
        """Of storing a batch, seconds as above, with others of these runs; adds its own run."""
        of_run = 0.0
        if batch.run not in runs:
            runs.add(batch.run)
            of_run = _RUN_S if self.knows(batch.run) else _NEW_RUN_S
        of_prints = _FINGERPRINT_S * len(batch.prints)
        return of_run + _BATCH_S + of_prints + _POINT_S * batch.points

    def _outcomes(self, group: list[_Waiting]) -> Sequence[wire.Answer | Exception]:
        try:
            stored = self._store(group)
        except wire.WireError as error:
            # Refused for what is in the database already: no fault of this server's.
            return self._one_by_one(group, error)
        except Exception as error:
            if is_unable(error):
                text = f"{len(group)} batches could not be stored: {why(error)}"
                self._failures.warn(_logger, text)
                self._health.wrote(why(error))
                return [error] * len(group)
            _logger.exception("a transaction with %d batches failed", len(group))
            return self._one_by_one(group, error)
        self._health.wrote()
        return stored

    def _one_by_one(
        self, group: list[_Waiting], error: Exception
    ) -> Sequence[wire.Answer | Exception]:
        """One that cannot be stored must not take the others with it."""
        return [error] if len(group) == 1 else [self._outcomes([one])[0] for one in group]

    def _store(self, group: list[_Waiting]) -> list[wire.Answer]:
        try:
            with writing(self._engine) as connection:
                began = time.monotonic()  # having waited for others who write
                received = [(one.batch, one.received_at) for one in group]
                answers = store_batches(connection, received, self._known)
        except BaseException:
            # It may know numbers that were never committed.
            self._known.forget()
            raise
        runs: set[str] = set()
        expected = _COMMIT_S + sum(self._cost(one.batch, runs) for one in group)
        self._slowness += _GAIN * ((time.monotonic() - began) / expected - self._slowness)
        for run in runs:
            self._stored[run] = None
            self._stored.move_to_end(run)
        while len(self._stored) > _MAX_KNOWN:
            self._stored.popitem(last=False)
        return answers


def _deliver(outcomes: list[_Outcome]) -> None:
    for future, outcome in outcomes:
        if future.done():  # whoever waited is gone
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
