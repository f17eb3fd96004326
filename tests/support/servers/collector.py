"""A real HTTP server on loopback that takes batches as the server does, and can be made not to."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rankscope.agent import wire


@dataclass
class Reply:
    """What the collector does with a request instead of taking it.

    `action`: `answer` with `status`, `hang` until the collector stops, `close` the connection
    without an answer, or `lose` the answer after the batch was stored. An error whose `body` has
    fields has those, too, by which the server's own are known.
    """

    action: str = "answer"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] | str = field(default_factory=dict)


HANG, CLOSE, LOSE = Reply("hang"), Reply("close"), Reply("lose")


class Collector:
    """Stores batches by (run, rank, session, seq), as the server does.

    Attributes:
        always: the reply to every request, where set.
        replies: replies to the next requests, one each.
        largest_body: bodies above it get 413, where set.
        answer: further fields of the answer to what is accepted.
        held: what is taken is not answered before it is set, where there is one.
        requests: number of requests seen.
        duplicates: number of those with a batch that was there already.
        connections: number of connections taken.
        times: when each request was seen, `time.monotonic`.
    """

    def __init__(self) -> None:
        self.always: Reply | None = None
        self.replies: deque[Reply] = deque()
        self.largest_body: int | None = None
        self.answer: dict[str, Any] = {}
        self.held: threading.Event | None = None
        self.requests = 0
        self.duplicates = 0
        self.connections = 0
        self.times: list[float] = []
        self.authorizations: list[str | None] = []
        self._batches: dict[tuple[str, int, str, int], wire.Batch] = {}
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None
        self._connections: set[socket.socket] = set()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])

    def __enter__(self) -> Collector:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, on the same port as ever."""
        assert self._server is None
        self._stopping = threading.Event()
        collector = self

        class Handler(_Handler):
            pass

        Handler.collector = collector
        self._server = _Server(("127.0.0.1", self.port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def stop(self) -> None:
        """Stop listening and cut every connection, as a killed process does."""
        if self._server is None or self._thread is None:
            return
        self._stopping.set()
        if self.held is not None:
            self.held.set()
        self._server.shutdown()
        for connection in list(self._connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the other end was faster
        self._server.server_close()  # waits for the handlers
        self._thread.join()
        self._server = self._thread = None

    @property
    def batches(self) -> list[wire.Batch]:
        """What is stored, in the order of arrival."""
        with self._changed:
            return list(self._batches.values())

    def points(self, metric: str, rank: int | None = None) -> dict[int, float]:
        """step -> value of a metric; later batches win."""
        found: dict[int, float] = {}
        for batch in self.batches:
            if metric in batch.columns and rank in (None, batch.rank):
                column = batch.columns[metric]
                found.update(zip(column.steps.tolist(), column.values.tolist(), strict=True))
        return found

    def stored(self) -> int:
        """Number of points and fingerprints stored."""
        return sum(batch.points + len(batch.prints) for batch in self.batches)

    def wait_for(self, condition: Callable[[Collector], bool], timeout: float = 20.0) -> None:
        """Wait until something holds; checked with each request."""
        with self._changed:
            if not self._changed.wait_for(lambda: condition(self), timeout):
                raise AssertionError(
                    f"not within {timeout} s; {self.requests} requests, {len(self._batches)} stored"
                )

    def take(self, body: bytes) -> dict[str, Any]:
        """Store a batch once; the answer."""
        batch = wire.decode(body)
        key = (batch.run, batch.rank, batch.session, batch.seq)
        with self._changed:
            duplicate = key in self._batches
            self.duplicates += duplicate
            self._batches.setdefault(key, batch)
        accepted = 0 if duplicate else batch.points + len(batch.prints)
        return {"accepted": accepted, "duplicate": duplicate, **self.answer}

    def next_reply(self, size: int) -> Reply:
        with self._changed:
            # First of all: a server that takes at one time what is too large at another would
            # get the halves of what it has.
            if self.largest_body is not None and size > self.largest_body:
                return Reply(status=413)
            if self.replies:
                return self.replies.popleft()
            return self.always or Reply()

    def saw(self) -> None:
        with self._changed:
            self.requests += 1
            self.times.append(time.monotonic())
            self._changed.notify_all()

    def hang(self) -> None:
        self._stopping.wait()


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that goes away is part of the tests


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    collector: Collector

    def setup(self) -> None:
        super().setup()
        self.collector.connections += 1
        self.collector._connections.add(self.connection)

    def finish(self) -> None:
        self.collector._connections.discard(self.connection)
        super().finish()

    def do_POST(self) -> None:
        collector = self.collector
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path != "/api/v1/ingest":
            self._answer(404, {}, {"title": "Not Found", "status": 404})
            return
        collector.authorizations.append(self.headers.get("Authorization"))
        reply = collector.next_reply(len(body))
        status, headers, content = reply.status, reply.headers, reply.body
        if status >= 400 and isinstance(content, dict):
            content = {"status": status, "instance": self.path, **content}
        if reply.action == "lose" or (reply.action == "answer" and status == 200 and not content):
            try:
                content = collector.take(body)
            except wire.WireError as error:
                status = 422
                content = {"status": 422, "instance": self.path, "detail": str(error)}
        # Before the answer, so that whoever has it can rely on the counts.
        collector.saw()
        if collector.held is not None:
            collector.held.wait()
        if reply.action == "answer":
            self._answer(status, headers, content)
            return
        self.close_connection = True
        if reply.action == "hang":
            collector.hang()
        else:
            self.connection.shutdown(socket.SHUT_RDWR)

    def _answer(self, status: int, headers: dict[str, str], body: dict[str, Any] | str) -> None:
        content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def wait_until(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    """Wait for something that nothing can notify of."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"not within {timeout} s"
        time.sleep(0.005)
