"""Takes batches out of the outbox to the server: one at a time, in order, until acknowledged."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from rankscope.agent.delivery.queue import Entry, Outbox
from rankscope.agent.delivery.transport import Accepted, Away, Outcome, Refused, TooLarge, Transport

# A server that refuses our hello and asks for another one would otherwise go on for ever, and each
# refused hello costs the points of its batch.
_HELLOS_REFUSED = 2
_RESTART_SECONDS = 60.0
# How the decoder of every version refuses those after it.
_OF_THE_VERSION = "v: version "

# Never the generator of the module `random`: its state belongs to the trainer.
_jitter = random.Random()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often and how long; durations in seconds.

    Attributes:
        batch: between two batches while there is something to say.
        steady_after: from the start until batches are made less often, except while the server
            looks closer or no step ends.
        steady_batch: between two batches from then on. Each lengthens a step of the training, and
            no more than one in a thousand is to be longer.
        batch_away: between two batches while the server is away or not wanted: each is a file.
        heartbeat: between two signs of life while there is nothing to say.
        connect_timeout: for a connection to come about.
        read_timeout: for an answer.
        first_backoff: pause after the first failure; doubles with each further one.
        longest_backoff: longest pause, unless the server asks for a longer one.
        failures_told: number of failures in a row after which the user is told.
        uploader_after: until a process of its own is started to post.
    """

    batch: float = 0.5
    steady_after: float = 20.0
    steady_batch: float = 4.0
    batch_away: float = 1.0
    heartbeat: float = 4.0
    connect_timeout: float = 1.0
    read_timeout: float = 3.0
    first_backoff: float = 0.25
    longest_backoff: float = 5.0
    failures_told: int = 3
    uploader_after: float = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What became of what was handed over; in points and prints.

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
    """Posts the outbox's batches and draws the consequences.

    Args:
        transport: to the server; None where there is to be none (`mode="offline"`).
        turn: held while the outbox is touched, never during a request.
        tell: takes (kind of problem, sentence).
        on_connected: called when the server has answered for the first time.

    Attributes:
        hello_wanted: the server asked this process for a hello that it has not been given yet.
        dense_until: the server's last wish; None before the first.
        rows_refused: the server is older than rows, and wants columns.
        stopped: no further request is to be made.
        posting: a request is under way.
    """

    def __init__(
        self,
        outbox: Outbox,
        transport: Transport | None,
        *,
        pace: Pace,
        turn: AbstractContextManager[Any],
        tell: Callable[[str, str], None],
        on_connected: Callable[[], None],
    ) -> None:
        self._outbox = outbox
        self._transport = transport
        self._pace = pace
        self._turn = turn
        self._tell = tell
        self._on_connected = on_connected
        self.hello_wanted = True
        self.dense_until: int | None = None
        self.rows_refused = False
        self.stopped = False
        self.posting = False
        # What was left to the uploader: then nothing else is posted.
        self._left: tuple[Entry, bytes] | None = None
        self._connected = False
        self._heard_at = float("-inf")
        self._failures_in_row = 0
        self._hellos_refused = 0
        self._retry_at = self._asked_until = 0.0
        self._accepted = self._posts = self._failures = self._sent_bytes = 0

    @property
    def away(self) -> bool:
        """Whether the last request failed, or there is no server by choice."""
        return self._transport is None or self._failures_in_row > 0

    @property
    def next_try(self) -> float:
        """When (`time.monotonic`) to call `run` again; infinity where it has nothing to post."""
        if self._transport is None or self._left is not None or not len(self._outbox):
            return float("inf")
        return self._retry_at

    def use(self, transport: Transport | None) -> None:
        """Post by this one from now on."""
        self._transport = transport

    def run(self, until: float, *, closing: bool = False) -> None:
        """Post what waits, as long as the server takes it.

        Args:
            until: (`time.monotonic`) when to return at the latest; while closing requests are
                made short enough for it, otherwise it is looked at between two requests.
            closing: it is now or never: pauses are short.
        """
        transport = self._transport
        self.settle()
        if self._left is not None and not closing:
            return
        self._left = None
        # A server that was there a moment ago is being restarted and gets all the time there is;
        # nobody should wait at the end of a job for one that never was.
        restarting = time.monotonic() - self._heard_at < _RESTART_SECONDS
        failures_left = 10**6 if restarting else 1 if self.away else self._pace.failures_told
        while transport is not None and not self.stopped and (now := time.monotonic()) < until:
            if not closing and now < self._retry_at:
                break
            if now < self._asked_until:
                if self._asked_until > until:
                    break
                time.sleep(self._asked_until - now)
                continue
            with self._turn:
                head = self._outbox.head()
            if head is None:
                break
            entry, body = head
            if len(self._outbox) == 1 and not closing and transport.leave(body):
                # Its answer is read with the next batch: waking up for it would lengthen another
                # step of the training.
                self._left = head
                break
            self.posting = True
            outcome = transport.post(body, at_most=until - now if closing else None)
            self.posting = False
            with self._turn:
                self._conclude(entry, body, outcome)
            if closing and isinstance(outcome, Away):
                failures_left -= 1
                if outcome.misdirected or not failures_left:
                    break
                time.sleep(min(self._pace.first_backoff, max(0.0, until - time.monotonic())))
        if self.away:
            with self._turn:
                self._outbox.spill()

    def settle(self) -> None:
        """Draws the consequences of the post that is made by the uploader, if it is done."""
        transport, left = self._transport, self._left
        if transport is None or left is None:
            return
        outcome = transport.outcome()
        if not transport.busy:
            self._left = None  # if it was lost on the way, it still is what is to be posted next
        if outcome is not None:
            with self._turn:
                self._conclude(*left, outcome)

    @property
    def left(self) -> bool:
        """Whether a post is left to the uploader, so that `listen` waits for what comes of it."""
        return self._left is not None

    def listen(self, seconds: float) -> None:
        """Returns after so long, or when something came of it that `run` should know of at once."""
        if self._transport is not None:
            self._transport.listen(seconds)

    def counters(self, dropped: Mapping[str, int]) -> Counters:
        """The counters so far."""
        with self._turn:
            return Counters(
                accepted=self._accepted,
                waiting=self._outbox.waiting,
                spooled=self._outbox.spooled,
                dropped=dict(dropped),
                posts=self._posts,
                failures=self._failures,
                sent_bytes=self._sent_bytes,
            )

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def interrupt(self) -> None:
        """A request is not to be waited for that another process makes; from another thread."""
        if self._transport is not None:
            self._transport.interrupt()

    def forget(self) -> None:
        """This is a forked child: what is open belongs to its parent."""
        if self._transport is not None:
            self._transport.forget()

    def _conclude(self, entry: Entry, body: bytes, outcome: Outcome) -> None:
        self._posts += 1
        self._sent_bytes += len(body)
        if isinstance(outcome, Away):
            self._back_off(outcome)
            return
        self._failures_in_row, self._retry_at = 0, 0.0
        self._heard_at = time.monotonic()
        if not self._outbox.begins_with(entry):
            return  # given up while it was posted: it has been counted
        if isinstance(outcome, Accepted):
            self._outbox.acknowledge(entry)
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
            if not self._outbox.split(entry, body):
                self._outbox.give_up(entry, "too_large")
                self._tell("too_large", "the server takes no body as large as one fingerprint")
        else:
            self._refused(entry, body, outcome)

    def _refused(self, entry: Entry, body: bytes, outcome: Refused) -> None:
        if _OF_THE_VERSION in outcome.why and self._outbox.simplify(entry, body):
            # A server that was not updated before its trainers: what it can read is enough.
            self.rows_refused = True
            return
        self._outbox.give_up(entry, "refused")
        self._hellos_refused += entry.hello
        self._tell(
            "refused",
            f"the server refuses a batch, so its {entry.points} points are lost: {outcome.why}",
        )

    def _back_off(self, outcome: Away) -> None:
        self._failures += 1
        self._failures_in_row += 1
        pause = self._pace.longest_backoff
        if not outcome.misdirected:
            # The exponent is bounded, or it overflows after some days without a server.
            doubled = self._pace.first_backoff * 2.0 ** min(self._failures_in_row - 1, 16)
            pause = min(pause, doubled)
        # Jitter, so that a thousand ranks do not come back in the same moment.
        pause *= _jitter.uniform(0.5, 1.0)
        now = time.monotonic()
        if outcome.retry_after is not None:
            self._asked_until = now + outcome.retry_after
            pause = max(pause, outcome.retry_after)
        self._retry_at = now + pause
        if self._failures_in_row >= self._pace.failures_told:
            self._tell("away", outcome.why)
