"""The background thread that takes facts to the server: batch, send, back off, keep, close."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rankscope.agent import wire
from rankscope.agent.launcher import Identity
from rankscope.agent.options import Options
from rankscope.agent.records import Records


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often and how long; durations in seconds.

    Attributes:
        batch: between two batches while there is something to say.
        batch_away: the same while the server is away or not wanted, where each batch is a file.
        heartbeat_seconds: between two signs of life while there is nothing to say.
        connect_timeout: for a connection to come about.
        read_timeout: for an answer.
        first_backoff: pause after the first failure; doubles with each further one.
        longest_backoff: longest pause.
    """

    batch: float = 0.5
    batch_away: float = 1.0
    heartbeat_seconds: float = 2.0
    connect_timeout: float = 1.0
    read_timeout: float = 3.0
    first_backoff: float = 0.25
    longest_backoff: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What became of what was handed over; in points and prints.

    Attributes:
        accepted: acknowledged by the server.
        waiting: in memory, not acknowledged yet.
        spooled: in the spool on disk, not acknowledged yet.
        dropped: given up since the start, by reason.
        posts: number of requests made.
        failures: number of requests that have to be made again.
        sent_bytes: bodies of the requests together.
    """

    accepted: int = 0
    waiting: int = 0
    spooled: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    posts: int = 0
    failures: int = 0
    sent_bytes: int = 0


class Sender:
    """Sends one rank's records, exactly once, whatever dies.

    Nothing here waits for the network on the caller's thread except `close`, and that one not
    longer than its timeout. A forked child neither sends nor spools nor blocks.

    Args:
        hello: makes what is said of this process; called in the sender thread.
        phase: where the training thread was last seen; called in the sender thread.
        prepare: called in the sender thread before each drain.
        on_problem: told a sentence once for each kind of problem.
    """

    def __init__(
        self,
        records: Records,
        *,
        options: Options,
        identity: Identity,
        hello: Callable[[], wire.Hello],
        phase: Callable[[], str],
        prepare: Callable[[], None] = lambda: None,
        on_problem: Callable[[str], None],
        pace: Pace = Pace(),
    ) -> None:
        self.dense_until: int | None = None

    @property
    def counters(self) -> Counters:
        """What became of what was handed over so far."""
        return Counters()

    def start(self) -> None:
        """Start the thread; harmless when it runs already."""

    def close(self, state: str = "finished", error: str = "", timeout: float = 5.0) -> None:
        """Send what is left with the final state, or leave it in the spool; once."""
