"""What has happened to which run, told within the process: to the worker and to open pages."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from rankscope.agent import wire


@dataclass(slots=True)
class Counters:
    """What this process has taken since it started."""

    batches: int = 0
    points: int = 0
    duplicates: int = 0
    refused: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def took(self, batch: wire.Batch, answer: wire.Answer) -> None:
        """Counts a batch and what was done with it."""
        with self._lock:
            self.batches += 1
            self.duplicates += answer.duplicate
            if not answer.duplicate:
                self.points += batch.points


class News:
    """A number for each run that grows with every batch.

    Attributes:
        wake: set when anything has come; the worker waits for it.
    """

    def __init__(self) -> None:
        self.wake = threading.Event()
        self.stopping = threading.Event()
        self._posts: dict[str, int] = {}
        self._lock = threading.Lock()

    def announce(self, run: str, points: int) -> None:
        """A batch of a run has been stored."""
        with self._lock:
            self._posts[run] = self._posts.get(run, 0) + 1
        self.wake.set()

    def posts(self, run: str) -> int:
        """Number of batches of a run that this process has taken."""
        return self._posts.get(run, 0)
