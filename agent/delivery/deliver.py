"""Takes batches from the queue to the server: one at a time, in order, until acknowledged.

They are posted by this process, and, once that has worked for a while, by the uploader's.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from rankscope.agent.delivery.address import address_of
from rankscope.agent.delivery.http import HttpClient, NoReply, Reply
from rankscope.agent.delivery.outcome import (
    Accepted,
    Away,
    Outcome,
    Refused,
    TooLarge,
    outcome_of,
)
from rankscope.agent.delivery.pace import Pace
from rankscope.agent.delivery.queue import BatchQueue, Entry
from rankscope.agent.delivery.uploader import UploaderSupervisor

# A server that refuses our hello and asks for another one would otherwise go on for ever, and each
# refused hello costs the points of its batch.
_HELLOS_REFUSED = 2
_RESTART_SECONDS = 60.0

# Whoever was sent away together must not come back together: later than asked for, by up to this
# part of the time.
_LATER = 0.5

# Never the generator of the module `random`: its state belongs to the trainer.
_jitter = random.Random()


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What became of what was published; in points and fingerprints.

    Attributes:
        accepted: acknowledged by the server.
        waiting: in a batch in memory, not acknowledged yet.
        spooled: in the spool on disk, not acknowledged yet.
        dropped: given up since the start, by reason.
        posts: number of requests made.
        failures: number of requests that had to be made again.
        sent_bytes: bodies of the requests together.
    """

    accepted: int = 0
    waiting: int = 0
    spooled: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    posts: int = 0
    failures: int = 0
    sent_bytes: int = 0


class Delivery:
    """Posts the batches of a queue and draws the consequences.

    For one thread, except `counters` and `interrupt`.

    Nothing is posted before `connect` was called.

    Args:
        queue: the batches.
        server: URL of the server, with the path it may have behind a proxy; None where there is to
            be none (`mode="offline"`).
        token: bearer token.
        pace: how often and how long.
        turn: held while the queue is touched, never during a request.
        report: takes (kind of problem, sentence).
        on_connected: called when the server has answered for the first time.
        uploader_faults: contains what fails in dealing with the uploader's process.
        on_uploader_lost: called with the reason, once, when posts are made here again.

    Attributes:
        hello_wanted: the server asked this process for a hello that it has not been given yet.
        dense_until: the last step of the server's latest dense-sampling request; None before the
            first.
        rows_refused: the server is older than rows, and wants columns.
        stopped: no further request is to be made.
        posting: a request is under way.
        uploader: posts in this process's place.
    """

    def __init__(
        self,
        queue: BatchQueue,
        server: str | None,
        token: str | None = None,
        *,
        pace: Pace,
        turn: AbstractContextManager[Any] | None = None,
        report: Callable[[str, str], None] = lambda kind, text: None,
        on_connected: Callable[[], None] = lambda: None,
        uploader_faults: AbstractContextManager[Any] | None = None,
        on_uploader_lost: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._queue = queue
        self._server = server
        self._token = token
        self._pace = pace
        self._turn = turn or contextlib.nullcontext()
        self._report = report
        self._on_connected = on_connected
        self._uploader_faults = uploader_faults or contextlib.nullcontext()
        self._on_uploader_lost = on_uploader_lost
        self.hello_wanted = True
        self.dense_until: int | None = None
        self.rows_refused = False
        self.stopped = False
        self.posting = False
        self.uploader: UploaderSupervisor | None = None
        self._client: HttpClient | None = None
        # Somebody has replied to a post of this process: before that no uploader is started.
        self._replied = False
        # What was left to the uploader: then nothing else is posted.
        self._left: tuple[Entry, bytes] | None = None
        self._connected = False
        self._heard_at = float("-inf")
        self._failures_in_row = 0
        self._hellos_refused = 0
        self._busy = False
        self._retry_at = self._asked_until = 0.0
        self._accepted = self._posts = self._failures = self._sent_bytes = 0

    def connect(self) -> None:
        """Prepares for posting; no request is made.

        Raises:
            Exception: of any kind, where the environment names a proxy that is none.
        """
        if self._server is None:
            return
        address = address_of(self._server, self._token)
        client = HttpClient(*address)
        self.uploader = UploaderSupervisor(
            address,
            after=self._pace.uploader_after,
            faults=self._uploader_faults,
            on_lost=self._on_uploader_lost,
        )
        self._client = client

    def take_from(self, queue: BatchQueue) -> None:
        """Deliver the batches of this queue from now on."""
        self._queue = queue

    @property
    def unprepared(self) -> bool:
        """Whether there is a server, but `connect` has not succeeded yet."""
        return self._server is not None and self._client is None

    @property
    def away(self) -> bool:
        """Whether the last request failed, or there is no server by choice."""
        return self._client is None or self._failures_in_row > 0

    @property
    def busy(self) -> bool:
        """Whether the last request was not taken because the server has too much to do."""
        return self._busy and self.away

    @property
    def next_try(self) -> float:
        """When (`time.monotonic`) to call `run` again; infinity where it has nothing to post."""
        if self._client is None or self._left is not None or not len(self._queue):
            return float("inf")
        return self._retry_at

    def run(self, until: float, *, closing: bool = False) -> None:
        """Post what waits, as long as the server takes it.

        Args:
            until: (`time.monotonic`) when to return at the latest; while closing requests are
                made short enough for it, otherwise it is checked between two requests.
            closing: it is now or never: pauses are short.
        """
        self.settle()
        if self._left is not None and not closing:
            return
        self._left = None
        # A server that was there a moment ago is being restarted and gets all the time there is;
        # nobody should wait at the end of a job for one that never was.
        restarting = time.monotonic() - self._heard_at < _RESTART_SECONDS
        failures_left = 10**6 if restarting else 1 if self.away else self._pace.failures_reported
        while self._client is not None and not self.stopped and (now := time.monotonic()) < until:
            if not closing and now < self._retry_at:
                break
            if now < self._asked_until:
                if self._asked_until > until:
                    break
                time.sleep(self._asked_until - now)
                continue
            with self._turn:
                head = self._queue.head()
            if head is None:
                break
            if len(self._queue) == 1 and not closing and self._send(head[1]):
                # Its answer is read with the next batch: waking up for it would lengthen another
                # step of the training.
                self._left = head
                break
            outcome = self._deliver(*head, at_most=until - now if closing else None)
            if closing and isinstance(outcome, Away):
                failures_left -= 1
                if outcome.misdirected or not failures_left:
                    break
                time.sleep(min(self._pace.first_backoff, max(0.0, until - time.monotonic())))
        if self.away:
            with self._turn:
                self._queue.spill()

    def deliver_next(self) -> tuple[bytes, Outcome] | None:
        """Post the oldest batch now, also before the next try is due; needs `connect`.

        Returns:
            The batch and what came of it; None where there is none that can be read.
        """
        with self._turn:
            head = self._queue.head()
        return None if head is None else (head[1], self._deliver(*head))

    def settle(self) -> None:
        """Draws the consequences of the post that is made by the uploader, if it is done."""
        uploader, left = self.uploader, self._left
        if uploader is None or left is None:
            return
        reply = uploader.answer()
        if not uploader.busy:
            self._left = None  # if it was lost on the way, it still is what is to be posted next
        if reply is not None:
            with self._turn:
                self._conclude(*left, outcome_of(reply))

    @property
    def left(self) -> bool:
        """Whether a post is left to the uploader, so that `listen` waits for what comes of it."""
        return self._left is not None

    def listen(self, seconds: float) -> None:
        """Returns after so long, or when something came of it that `run` should know of at once."""
        if self.uploader is not None:
            self.uploader.listen(seconds)

    def counters(self, dropped: Mapping[str, int]) -> Counters:
        """The counters so far."""
        with self._turn:
            return Counters(
                accepted=self._accepted,
                waiting=self._queue.waiting,
                spooled=self._queue.spooled,
                dropped=dict(dropped),
                posts=self._posts,
                failures=self._failures,
                sent_bytes=self._sent_bytes,
            )

    def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            self._client.close()
        if self.uploader is not None:
            self.uploader.dismiss()

    def interrupt(self) -> None:
        """A request is not to be waited for that another process makes; from another thread."""
        if self.uploader is not None:
            self.uploader.interrupt()

    def forget(self) -> None:
        """This is a forked child: what is open belongs to its parent."""
        if self.uploader is not None:
            self.uploader.forget()

    def _deliver(self, entry: Entry, body: bytes, at_most: float | None = None) -> Outcome:
        self.posting = True
        outcome = self._post(body, at_most)
        self.posting = False
        with self._turn:
            self._conclude(entry, body, outcome)
        return outcome

    def _post(self, body: bytes, at_most: float | None) -> Outcome:
        """Posts a batch by the uploader, where it reaches the server, or else from here.

        Args:
            body: as `wire.encode` made it.
            at_most: seconds that connecting and answering together may take, at the end.
        """
        client, uploader = self._client, self.uploader
        assert client is not None
        assert uploader is not None
        connect, read = self._pace.connect_timeout, self._pace.read_timeout
        reply: Reply | NoReply | None = None
        if at_most is None:
            reply = uploader.post(body, connect=connect, read=read, may_start=self._replied)
        else:
            connect, read = min(connect, at_most / 3), min(read, at_most * 2 / 3)
            # The training is over: now it is to be quick.
            uploader.dismiss()
        if isinstance(reply, Reply) and not uploader.proven:
            uploader.proven = True
            client.close()
        elif reply is None or not uploader.proven:
            unproven, reply = reply, client.post(body, connect=connect, read=read)
            if isinstance(reply, Reply):
                self._replied = True
                if isinstance(unproven, NoReply):
                    uploader.lose(f"it does not reach the server: {unproven.why}")
        return outcome_of(reply)

    def _send(self, body: bytes) -> bool:
        """Leaves a batch to the uploader; False where there is none that reaches the server."""
        pace = self._pace
        return self.uploader is not None and self.uploader.send(
            body, connect=pace.connect_timeout, read=pace.read_timeout
        )

    def _conclude(self, entry: Entry, body: bytes, outcome: Outcome) -> None:
        self._posts += 1
        self._sent_bytes += len(body)
        if isinstance(outcome, Away):
            self._back_off(outcome)
            return
        self._failures_in_row, self._retry_at = 0, 0.0
        self._heard_at = time.monotonic()
        if not self._queue.begins_with(entry):
            return  # given up while it was posted: it has been counted
        if isinstance(outcome, Accepted):
            self._queue.acknowledge(entry)
            self._accepted += entry.points
            if outcome.answer.dense_until is not None:
                self.dense_until = outcome.answer.dense_until
            # A process before this one is past answering.
            if entry.own and self._hellos_refused < _HELLOS_REFUSED:
                self.hello_wanted = self.hello_wanted or outcome.answer.hello_wanted
            if not self._connected:
                self._connected = True
                self._on_connected()
        elif isinstance(outcome, TooLarge):
            if not self._queue.split(entry, body):
                self._queue.give_up(entry, "too_large")
                self._report("too_large", "the server takes no body as large as one fingerprint")
        else:
            self._refused(entry, body, outcome)

    def _refused(self, entry: Entry, body: bytes, outcome: Refused) -> None:
        if outcome.of_the_version and self._queue.simplify(entry, body):
            # A server that was not updated before its trainers: what it can read is enough.
            self.rows_refused = True
            return
        stays = self._queue.give_up(entry, "refused")
        self._hellos_refused += entry.hello
        self._report(
            "refused",
            f"the server refuses a batch, so its {entry.points} points are lost"
            + (f" (it stays in {entry.folder.folder} as *.refused)" if stays else "")
            + f": {outcome.why}",
        )

    def _back_off(self, outcome: Away) -> None:
        self._failures += 1
        self._failures_in_row += 1
        self._busy = outcome.busy
        pause = self._pace.longest_backoff
        if not outcome.misdirected:
            # The exponent is bounded, or it overflows after some days without a server.
            doubled = self._pace.first_backoff * 2.0 ** min(self._failures_in_row - 1, 16)
            pause = min(pause, doubled)
        # Jitter, so that a thousand ranks do not come back in the same moment.
        pause *= _jitter.uniform(0.5, 1.0)
        now = time.monotonic()
        if outcome.retry_after is not None:
            asked = outcome.retry_after * _jitter.uniform(1.0, 1.0 + _LATER)
            self._asked_until = now + asked
            pause = max(pause, asked)
        self._retry_at = now + pause
        # What a person has to put right does not pass by itself: a short run would end unreported.
        if outcome.misdirected or self._failures_in_row >= self._pace.failures_reported:
            kind = "busy" if outcome.busy else "token" if outcome.of_the_token else "away"
            self._report(kind, outcome.why)
