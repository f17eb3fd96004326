"""Makes batches of what the training thread has published, and puts them into the queue."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np

from rankscope.agent import wire
from rankscope.agent.delivery.deliver import Delivery
from rankscope.agent.delivery.pace import Pace
from rankscope.agent.delivery.queue import BatchQueue, halve, weight_of
from rankscope.agent.delivery.records import ENTRIES_A_GO, Drained, Records
from rankscope.agent.launcher import Identity
from rankscope.agent.options import Options

# Points up to here go as rows: beside a training, which has the caches to itself, making series of
# a few points each takes longer than all the rest. More of them repeat their names too often.
_POINTS_IN_ROWS = 256
# How often a batch may fail to be encoded in halves, quarters and so on before the rest is given
# up, and how many hellos may.
_FAILED_ENCODINGS = 64
_HELLOS_LOST = 3


class BatchMaker:
    """Makes the batches of one process, numbered from 0; the caller holds the sender's lock.

    Args:
        records: what was published.
        queue: takes the batches.
        delivery: knows whether the server wants a hello, and whether it can read rows.
        options: project and mode are used.
        identity: place of this process in the job.
        session: random text of this process.
        pace: how often there is a sign of life.
        hello: makes what is said of this process; None where that failed.
        phase: where the training thread was last seen; None where that failed.
        encoder: contains what fails in encoding a batch.
        pause: called now and then, to let the training thread go on.

    Attributes:
        through_step: last step that is complete with what was made so far, -1 before the first.
    """

    def __init__(
        self,
        records: Records,
        queue: BatchQueue,
        delivery: Delivery,
        *,
        options: Options,
        identity: Identity,
        session: str,
        pace: Pace,
        hello: Callable[[], wire.Hello | None],
        phase: Callable[[], str | None],
        encoder: AbstractContextManager[Any],
        pause: Callable[[], None],
    ) -> None:
        self._records = records
        self._queue = queue
        self._delivery = delivery
        self._options = options
        self._identity = identity
        self._session = session
        self._pace = pace
        self._hello = hello
        self._phase = phase
        self._encoder = encoder
        self._pause = pause
        self._seq = 0
        self._next_heartbeat = 0.0
        self._hellos_lost = 0
        self._last_is_made = False
        self.through_step = -1

    def make(self) -> Drained:
        """Makes the next batch, where there is something to say or a sign of life is due.

        Returns:
            What it was made of; `more` says whether there is another one to make.
        """
        drained = self._records.drain(pause=self._pause)
        self._put(drained)
        return drained

    def make_last(self, state: str, error: str) -> None:
        """Makes batches of all that is left, the last with how this process ended; once."""
        self._records.stop()
        while not self._last_is_made:
            drained = self._records.drain()
            if drained.more:
                self._put(drained)
                continue
            self._last_is_made = True
            self._put(drained, state=state, error=error)

    def _put(self, drained: Drained, *, state: str = "running", error: str = "") -> None:
        now = time.monotonic()
        silent = drained.empty and drained.through_step <= self.through_step
        # What waits in the queue is a sign of life already; more of them would only fill it.
        heartbeat_due = (
            self._options.mode == "online"
            # The next occasion is a whole interval away: better a little early than late.
            and now >= self._next_heartbeat - self._pace.batch / 2
            and not self._queue
        )
        if silent and not heartbeat_due and state == "running":
            return
        self._next_heartbeat = now + self._pace.heartbeat
        self.through_step = max(self.through_step, drained.through_step)
        points: dict[str, Any] = {"rows": drained.rows, "word_rows": drained.word_rows}
        count = sum(len(values) for _, values in (*drained.rows, *drained.word_rows))
        if count > _POINTS_IN_ROWS or self._delivery.rows_refused:
            points = {
                "columns": wire.columns_of(self._with_pauses(drained.rows), np.float64),
                "words": wire.columns_of(self._with_pauses(drained.word_rows), np.uint64),
            }
        identity = self._identity
        # Whatever becomes of the batch: the server takes no two of the same number.
        seq, self._seq = self._seq, self._seq + 1
        batch = wire.Batch(
            project=self._options.project,
            run=identity.run,
            rank=identity.rank,
            session=self._session,
            attempt=identity.attempt,
            seq=seq,
            world_size=identity.world_size,
            sent_at=time.time(),
            through_step=self.through_step,
            state=state,
            phase=self._phase() or "",
            error=error,
            hello=self._say_hello() if self._delivery.hello_wanted else None,
            prints=drained.fingerprints,
            layers=drained.layers,
            events=drained.events,
            dropped=self._records.dropped,
            **points,
        )
        try:
            self._append(batch, [_FAILED_ENCODINGS])
        except BaseException:
            # The hello went with the batch, and the server may have no later batch to ask in.
            self._delivery.hello_wanted |= batch.hello is not None
            raise

    def _with_pauses(self, rows: Iterable[wire.Row]) -> Iterator[wire.Row]:
        """The rows, with time between them for the training thread."""
        for place, row in enumerate(rows, 1):
            yield row
            if not place % ENTRIES_A_GO:
                self._pause()

    def _append(self, batch: wire.Batch, tries: list[int]) -> None:
        """Encodes a batch; where that fails, its halves, until only what cannot be is left out."""
        body = None
        with self._encoder:
            body = wire.encode(batch)
        if body is not None:
            hello = batch.hello is not None
            self._queue.put(batch.seq, body, points=weight_of(batch), hello=hello)
            return
        tries[0] -= 1
        halves = halve(batch) if tries[0] > 0 else None
        if halves is not None:
            for half in halves:
                self._append(half, tries)
            return
        self._records.lose("unsendable", weight_of(batch) + len(batch.events))
        if batch.hello is not None:
            self._hellos_lost += 1
            self._delivery.hello_wanted = self._hellos_lost < _HELLOS_LOST

    def _say_hello(self) -> wire.Hello | None:
        self._delivery.hello_wanted = False
        hello = self._hello()
        if hello is None:
            return None
        return replace(
            hello, heartbeat_seconds=self._pace.heartbeat, config=_sendable(hello.config)
        )


def _sendable(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration as the wire can carry it; what is not plain becomes text."""
    try:
        plain: Mapping[str, Any] = json.loads(json.dumps(config, default=str, skipkeys=True))
    except (TypeError, ValueError, RecursionError) as error:
        return {"unreadable": str(error)}
    return plain
