"""What works in the background: that it is there, what fails of it, and what goes on all the same.

Three rules. A run that fails fails alone: it is tried again after a pause that doubles, and logged
once. A thread that ends unexpectedly is started again, and the server is not ready meanwhile. And
all of it is counted, for `/metrics`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

_logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0
# A failure that took long is waited for longer: it takes this part of the time at most.
_FAILING_SHARE = 1 / 20
# A thread is started again sooner: everything waits for it.
_MAX_RESTART_PAUSE_S = 30.0
_SHORT_LIFE_S = 60.0


class Sparingly:
    """Says the same thing again after a while only, and how often it happened meanwhile."""

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._next = -math.inf
        self._unsaid = 0

    def warn(self, logger: logging.Logger, text: str) -> None:
        """Logs a line, or counts it."""
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                self._unsaid += 1
                return
            again = f" ({self._unsaid} more since the last line)" if self._unsaid else ""
            self._next, self._unsaid = now + self._seconds, 0
        logger.warning("%s%s", text, again)


class Health:
    """What is reported of the background work of one process, and of the process beside it.

    Attributes:
        changed: called after each change.
    """

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self.changed = changed
        self._lock = threading.Lock()
        self._missing: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        self._failing: dict[str, int] = {}
        self._unwritable = ""
        self._refused_at = -math.inf
        self._beside: Mapping[str, Any] = {}

    def count(self, what: str) -> None:
        """Something has happened once more: `evaluation_failures`, `background_restarts`."""
        with self._lock:
            self._counts[what] += 1
        self.changed()

    def failing(self, work: str, runs: int) -> None:
        """This many runs fail at present at some work, and are left alone for a while."""
        with self._lock:
            if self._failing.get(work, 0) == runs:
                return
            self._failing[work] = runs
        self.changed()

    @property
    def unwritable(self) -> str:
        """Why the last batches could not be stored; empty where they were."""
        return self._unwritable

    def wrote(self, problem: str = "") -> None:
        """Batches were stored, or could not be for what the database says."""
        self._unwritable = problem
        if problem:
            self._refused_at = time.monotonic()

    @property
    def seconds_since_refused(self) -> float:
        """Since batches could last not be stored; infinite where they always were."""
        return time.monotonic() - self._refused_at

    def missing(self, name: str, why: str) -> None:
        """A part has ended, and is to be started again."""
        with self._lock:
            self._missing[name] = why
        self.changed()

    def there(self, name: str) -> None:
        """A part works."""
        with self._lock:
            if self._missing.pop(name, None) is None:
                return
        self.changed()

    def receive(self, beside: Mapping[str, Any]) -> None:
        """Takes the `report` of the process beside this one."""
        with self._lock:
            self._beside = beside

    def report(self) -> dict[str, Any]:
        """What there is to report, both processes together: `missing`, `counts`, `failing`."""
        with self._lock:
            beside = self._beside
            return {
                "missing": {**beside.get("missing", {}), **self._missing},
                "counts": dict(self._counts + Counter(beside.get("counts", {}))),
                "failing": {
                    work: self._failing.get(work, 0) + beside.get("failing", {}).get(work, 0)
                    for work in {*self._failing, *beside.get("failing", {})}
                },
            }


class Kept:
    """A thread that is started again when it ends without having been asked to.

    Args:
        name: under which it is reported.
        work: what it does; returns when `stopping` is set.
        stopping: set before it is to end.
    """

    def __init__(
        self, name: str, work: Callable[[], None], *, health: Health, stopping: threading.Event
    ) -> None:
        self._name = name
        self._work = work
        self._health = health
        self._stopping = stopping
        self._thread = threading.Thread(target=self._keep, name=f"rankscope-{name}", daemon=True)

    @property
    def ident(self) -> int | None:
        """The thread's number; None before its start."""
        return self._thread.ident

    @property
    def alive(self) -> bool:
        """Whether it has begun and not ended."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Starts it."""
        self._thread.start()

    def join(self, timeout: float) -> None:
        """Waits for its end, if it was ever started."""
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _keep(self) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            began = time.monotonic()
            why = "it has returned"
            try:
                self._work()
            except BaseException as error:
                # Whatever it is: without this thread the server would look well and do nothing.
                why = f"{type(error).__name__}: {error}"[:200]
                if not self._stopping.is_set():
                    _logger.exception("the %s has ended unexpectedly", self._name)
            if self._stopping.is_set():
                return
            self._health.missing(self._name, why)
            self._health.count("background_restarts")
            if time.monotonic() - began > _SHORT_LIFE_S:
                pause = _FIRST_PAUSE_S
            _logger.error("the %s is started again in %.0f s (%s)", self._name, pause, why)
            if self._stopping.wait(pause):
                return
            pause = min(2 * pause, _MAX_RESTART_PAUSE_S)
            self._health.there(self._name)


@dataclass(slots=True)
class _Failing:
    """A run that fails: how often in a row, when it is tried again, and what was logged of it."""

    times: int = 0
    retry_at: float = 0.0
    logged: str = ""


class Failures:
    """The runs that fail at some work, each of which is left alone for a while.

    Args:
        work: `evaluation` or `compaction`.
        clock: seconds, of which only differences count.
    """

    def __init__(
        self, work: str, health: Health, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._work = work
        self._health = health
        self._clock = clock
        self._runs: dict[int, _Failing] = {}

    def due(self, run: int) -> bool:
        """Whether a run may be tried now."""
        found = self._runs.get(run)
        return found is None or self._clock() >= found.retry_at

    def failed(self, run: int, name: str, error: BaseException, *, took: float = 0.0) -> None:
        """A run has failed; the same failure again and again is logged once.

        Args:
            took: seconds of work that have come to nothing.
        """
        found = self._runs.setdefault(run, _Failing())
        pause = min(_FIRST_PAUSE_S * 2**found.times, _MAX_PAUSE_S)
        pause = max(pause, took / _FAILING_SHARE)
        found.times = min(found.times + 1, 32)
        found.retry_at = self._clock() + pause
        kind = f"{type(error).__module__}.{type(error).__qualname__}"
        if found.logged != kind:
            found.logged = kind
            _logger.error(
                "%s: %s failed, again in %.0f s, then ever less often; further failures of this "
                "kind are counted only",
                name,
                self._work,
                pause,
                exc_info=error,
            )
        self._health.count(f"{self._work}_failures")
        self._health.failing(self._work, len(self._runs))

    def succeeded(self, run: int) -> None:
        """A run has not failed."""
        if self._runs.pop(run, None) is not None:
            self._health.failing(self._work, len(self._runs))

    def keep(self, runs: Collection[int]) -> None:
        """Forgets all other runs: they need nothing any more."""
        for run in self._runs.keys() - {*runs}:
            self.succeeded(run)
