"""How often batches are sent, how long a server is waited for, and when it is tried again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often and how long; durations in seconds.

    Attributes:
        batch: between two batches while there is something to say.
        steady_after: from the start until batches are made less often, except while the server
            asks for dense sampling or no step ends.
        steady_batch: between two batches from then on. Each lengthens a step of the training, and
            no more than one in a thousand is to be longer.
        batch_away: between two batches while the server is away or not wanted: each is a file.
        heartbeat: between two signs of life while there is nothing to say.
        connect_timeout: for a connection to come about.
        read_timeout: for an answer.
        first_backoff: pause after the first failure; doubles with each further one.
        longest_backoff: longest pause, unless the server asks for a longer one.
        failures_reported: number of consecutive failures after which the user is warned.
        uploader_after: until a process of its own is started to post; infinity for none.
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
    failures_reported: int = 3
    uploader_after: float = 3.0
