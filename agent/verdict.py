"""What the server finds, in the trainer: `monitor.verdict()` and `monitor.on_alert(...)`.

Asked in a thread, one a process however many monitors it has, which is started once the trainer
wants to know: who does not ask pays nothing, and who does never waits for an answer.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import urllib3

from rankscope.agent.delivery.address import Address
from rankscope.agent.guard import Probe
from rankscope.agent.wire import SEVERITIES

_log = logging.getLogger("rankscope")

# An evaluation follows a batch within a second; a trainer that stops some seconds later has lost
# nothing. What does not answer is asked less and less often.
_PERIOD_S, _LONGEST_S = 5.0, 60.0
_TIMEOUT_S = 10.0
# Of one answer: 100 alerts with all their evidence have less.
_MOST_BYTES = 16 * 2**20
# A page of the newest: more than open in one period.
_ALERTS = 100

Alert = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the server judged the run when it was last asked.

    Attributes:
        verdict: `pass`, `fail` or `pending`; a run that still trains does not pass yet.
        so_far: what it would be if the run ended now.
        reasons: why, a sentence each.
        at: when that was, seconds since 1970.
    """

    verdict: str
    so_far: str
    reasons: tuple[str, ...]
    at: float


class _NoAnswer(Exception):
    """The server did not say; why, for the log."""


class Judgement:
    """Asks a server of one run, now and then, once somebody wants to know.

    Args:
        server: its URL, without a slash at its end.
        address: where batches go: its headers and its proxy are those of these questions, too.
        asking: contains what goes wrong in here.
        callbacks: contains what goes wrong in what the trainer has called.
    """

    def __init__(
        self, server: str, run: str, address: Address, *, asking: Probe, callbacks: Probe
    ) -> None:
        self._url = f"{server}/api/v1/runs/{quote(run, safe='')}"
        self._headers = {n: v for n, v in address.headers.items() if n != "Content-Type"}
        self._proxy = address.proxy
        self._asking, self._calling = asking, callbacks
        self._verdict: Verdict | None = None
        self._callbacks: list[tuple[Callable[[Alert], object], int, set[str]]] = []
        self._stopped = self._is_asking = False
        self._pause, self._said = _PERIOD_S, ""

    def verdict(self) -> Verdict | None:
        """The last known; None before the first answer."""
        self._start()
        return self._verdict

    def on_alert(self, callback: Callable[[Alert], object], severity: str) -> None:
        """Has a function called for alerts of a severity, or a higher one."""
        if severity not in SEVERITIES:
            raise ValueError(f"severity is one of {', '.join(SEVERITIES)}, not {severity!r}")
        self._callbacks.append((callback, SEVERITIES.index(severity), set()))
        self._start(at_once=True)

    def stop(self) -> None:
        """Asks no more; nothing is waited for."""
        self._stopped = True
        if self._is_asking:
            _asker().remove(self)

    def ask_once(self) -> float:
        """Asks the server, calls what is to be called, and says after how many seconds again."""
        why = self._said
        with self._asking:
            why = self._why_not()
        if why and why != self._said:
            _log.warning("how the run is judged is not known: %s", why)
        self._pause = min(2 * self._pause, _LONGEST_S) if why else _PERIOD_S
        self._said = why
        return self._pause if self._asking.enabled else math.inf

    def _start(self, *, at_once: bool = False) -> None:
        if not self._stopped and (at_once or not self._is_asking):
            self._is_asking = True
            _asker().add(self)

    def _why_not(self) -> str:
        """Asks once; why there is no answer, empty where there is."""
        try:
            self._ask()
        except _NoAnswer as error:
            return str(error)
        return ""

    def _ask(self) -> None:
        found = self._get("/verdict")
        if found is None:
            return
        self._verdict = Verdict(
            found["verdict"], found["so_far"], tuple(found["reasons"]), time.time()
        )
        if self._callbacks:
            listed = self._get(f"/alerts?state=open&limit={_ALERTS}") or {"items": ()}
            for alert in reversed(listed["items"]):
                self._tell(alert)
            if len(listed["items"]) < _ALERTS:  # else there may be others that are open
                still = {alert["id"] for alert in listed["items"]}
                for _, _, known in self._callbacks:
                    known &= still  # what opens again is told again

    def _tell(self, alert: Alert) -> None:
        for callback, least, known in self._callbacks:
            grade = SEVERITIES.index(alert["severity"])
            if grade < least or alert["id"] in known:
                continue
            known.add(alert["id"])
            with self._calling:
                callback(alert)

    def _get(self, path: str) -> dict[str, Any] | None:
        """JSON of a route of the run; None while the server has not heard of it.

        Raises:
            _NoAnswer: there is none.
        """
        pool = (
            urllib3.PoolManager(num_pools=1)
            if self._proxy is None
            else urllib3.ProxyManager(self._proxy, num_pools=1)
        )
        with pool:
            try:
                answer = pool.request(
                    "GET",
                    self._url + path,
                    headers=self._headers,
                    timeout=_TIMEOUT_S,
                    retries=False,
                    redirect=False,
                    preload_content=False,
                )
                body = answer.read(_MOST_BYTES)
            except urllib3.exceptions.HTTPError as error:
                raise _NoAnswer(f"the server does not answer: {type(error).__name__}") from error
        if answer.status in (401, 403):
            raise _NoAnswer("the token may not read; `verdict` and `on_alert` need the scope read")
        if answer.status == 404:
            return None
        try:
            found = json.loads(body) if answer.status == 200 else None
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise _NoAnswer(f"the server answers {answer.status}")
        return found


class _Asker:
    """Asks for all judgements of a process, one after the other: one thread, one connection."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # When each is asked for next, by the clock that nobody sets.
        self._due: dict[Judgement, float] = {}
        self._thread: threading.Thread | None = None

    def add(self, judgement: Judgement) -> None:
        """Asks for it at once, and again and again."""
        with self._changed:
            self._due[judgement] = 0.0
            self._changed.notify()
            if self._thread is None:
                # Of a process that ends it is no reason to wait.
                self._thread = threading.Thread(
                    target=self._work, name="rankscope-judgement", daemon=True
                )
                self._thread.start()

    def remove(self, judgement: Judgement) -> None:
        """Asks for it no more; the thread ends with the last one."""
        with self._changed:
            self._due.pop(judgement, None)
            self._changed.notify()

    def _work(self) -> None:
        while (judgement := self._next()) is not None:
            pause = judgement.ask_once()
            with self._changed:
                # Gone, or asked for anew, meanwhile: nothing of that is changed.
                if self._due.get(judgement) == math.inf:
                    self._due[judgement] = time.monotonic() + pause

    def _next(self) -> Judgement | None:
        """Waits for the one that is due first; None: there is none left."""
        with self._changed:
            while self._due:
                judgement = min(self._due, key=self._due.__getitem__)
                left = self._due[judgement] - time.monotonic()
                if left <= 0:
                    self._due[judgement] = math.inf
                    return judgement
                self._changed.wait(min(left, _LONGEST_S))
            self._thread = None
            return None


# By process id: a forked child has none of its parent's threads, and must not wait for its locks.
_askers: dict[int, _Asker] = {}


def _asker() -> _Asker:
    return _askers.setdefault(os.getpid(), _Asker())
