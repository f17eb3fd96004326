"""Ranks that post over connections of their own, all in one thread."""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.load.batches import Rank


@dataclass
class Posted:
    """What was posted and answered.

    Attributes:
        at, latency_s, points: of each answered post; `at` in seconds since the start. Where the
            pace is given the latency counts from when the post was due, sent or not.
        errors: texts of answers that were no acceptance, the first of them.
    """

    at: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    points: list[int] = field(default_factory=list)
    accepted: int = 0
    bytes: int = 0
    refused: int = 0
    errors: list[str] = field(default_factory=list)


class _Line:
    """A rank's connection: one request at a time."""

    def __init__(self, rank: Rank, address: tuple[str, int]) -> None:
        self.rank = rank
        self.socket = socket.create_connection(address, timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.unsent = b""
        self.answer = b""
        self.points = 0
        self.since = 0.0

    def send(self, since: float) -> int:
        request, self.points = self.rank.next()
        self.since = since
        try:
            sent = self.socket.send(request)
        except BlockingIOError:
            sent = 0
        # The next rank's batch is written over this one.
        self.unsent = b"" if sent == len(request) else bytes(request[sent:])
        return len(request)


def post(
    ranks: list[Rank],
    address: tuple[str, int],
    *,
    seconds: float,
    interval_s: float | None,
    every_second: Callable[[float], None],
) -> Posted:
    """Posts until `seconds` have passed, then waits for the answers that are due.

    Args:
        interval_s: between two posts of a rank; None: each rank posts as soon as it is answered.
        every_second: called about once a second, with the seconds since the start.
    """
    posted = Posted()
    selector = selectors.DefaultSelector()
    lines = [_Line(rank, address) for rank in ranks]
    for line in lines:
        selector.register(line.socket, selectors.EVENT_READ, line)
    start = time.perf_counter()
    end = start + seconds
    # Ranks of one job end their steps together, but not to the microsecond.
    spread = (interval_s or 0.0) / len(lines)
    due = [(start + n * spread, line) for n, line in enumerate(lines)]
    busy: set[_Line] = set()
    tick = start

    def begin(line: _Line, since: float) -> None:
        posted.bytes += line.send(since)
        busy.add(line)
        if line.unsent:
            selector.modify(line.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, line)

    if interval_s is None:
        for _, line in due:
            begin(line, time.perf_counter())
        due = []
    waiting: list[tuple[float, _Line]] = []
    while True:
        now = time.perf_counter()
        if now >= tick + 1:
            tick = now
            every_second(now - start)
        if now >= end and not busy:
            break
        if now >= end + 60:
            posted.errors.append(f"{len(busy)} posts without an answer for a minute")
            break
        while due and due[0][0] <= now < end:
            at, line = due.pop(0)
            due.append((at + (interval_s or 0.0), line))
            if line in busy:
                waiting.append((at, line))
            else:
                begin(line, at)
        pause = 0.2 if not due else min(max(due[0][0] - now, 0.0), 0.2)
        for key, mask in selector.select(pause):
            line = key.data
            if mask & selectors.EVENT_WRITE:
                line.unsent = line.unsent[line.socket.send(line.unsent) :]
                if not line.unsent:
                    selector.modify(line.socket, selectors.EVENT_READ, line)
            if not mask & selectors.EVENT_READ or not _answered(line, posted, start):
                continue
            busy.discard(line)
            now = time.perf_counter()
            if now >= end:
                continue
            if interval_s is None:
                begin(line, now)
            else:
                late = next((n for n, (_, other) in enumerate(waiting) if other is line), None)
                if late is not None:
                    begin(line, waiting.pop(late)[0])
    for line in lines:
        line.socket.close()
    selector.close()
    return posted


def _answered(line: _Line, posted: Posted, start: float) -> bool:
    data = line.socket.recv(65536)
    if not data:
        raise ConnectionError("the server closed a connection")
    line.answer += data
    head, gap, body = line.answer.partition(b"\r\n\r\n")
    if not gap:
        return False
    at = head.lower().find(b"content-length:")
    if len(body) < int(head[at + 15 :].split(b"\r\n", 1)[0]):
        return False
    line.answer = b""
    if not head.startswith(b"HTTP/1.1 200"):
        posted.refused += 1
        if len(posted.errors) < 5:
            posted.errors.append((head.split(b"\r\n", 1)[0] + b" " + body)[:500].decode())
        return True
    now = time.perf_counter()
    posted.accepted += json.loads(body)["accepted"]
    posted.at.append(now - start)
    posted.latency_s.append(now - line.since)
    posted.points.append(line.points)
    return True
