"""What has happened to which run: sent to the worker, to open pages, and to other servers."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from rankscope.agent import wire

# Runs whose numbers are remembered; a page of one that was forgotten looks once for nothing.
_MAX_RUNS = 10_000


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


class RunEvents:
    """A number for each run that grows with everything that happens to it.

    Attributes:
        wake: set when batches have come; the worker waits for it.
        stopping: set when the server is about to end.
        forwarding: whether anybody collects what is to be sent to other processes.
        outgoing: set when there is something to `collect`.
    """

    def __init__(self) -> None:
        self.wake = threading.Event()
        self.stopping = threading.Event()
        self.forwarding = False
        self.outgoing = threading.Event()
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._number = 0
        self._unsent: set[str] = set()
        self._lock = threading.Lock()

    def announce(self, run: str, points: int) -> None:
        """A batch of a run has been stored by this process."""
        self._note(run, forward=True)
        self.wake.set()

    def changed(self, run: str) -> None:
        """This process has stored something else of a run: alerts, its state."""
        self._note(run, forward=True)

    def heard(self, run: str) -> None:
        """Another process has stored something of a run."""
        self._note(run, forward=False)
        self.wake.set()

    def missed(self) -> None:
        """Others could not be heard for a while: anything may have happened."""
        with self._lock:
            self._number += 1
            for run in self._numbers:
                self._numbers[run] = self._number
        self.wake.set()

    def number(self, run: str) -> int:
        """Differs from before if anything has happened to a run since."""
        return self._numbers.get(run, 0)

    def collect(self) -> set[str]:
        """Runs of which other processes have not been notified."""
        with self._lock:
            self.outgoing.clear()
            unsent, self._unsent = self._unsent, set()
            return unsent

    def _note(self, run: str, *, forward: bool) -> None:
        with self._lock:
            self._number += 1
            self._numbers[run] = self._number
            self._numbers.move_to_end(run)
            while len(self._numbers) > _MAX_RUNS:
                self._numbers.popitem(last=False)
            if forward and self.forwarding:
                self._unsent.add(run)
                self.outgoing.set()
