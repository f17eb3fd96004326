"""Between ranks and server: cuts, delays, repeats and reorders posts, and notes what was answered.

It passes HTTP posts on, one connection to the server for each. A batch counts as acknowledged from
the server's answer on, whether or not that reaches the rank.
"""

from __future__ import annotations

import http.client
import io
import random
import socket
import threading
import time
from dataclasses import dataclass

from rankscope.agent import wire

_SECONDS = 60.0


@dataclass
class Weather:
    """What happens to posts: probabilities of each, for one post.

    Attributes:
        refused: its connection is closed before anything is passed on.
        halved: half of it is passed on.
        unanswered: it is passed on, and its answer is not.
        late: it is passed on only after up to two seconds.
        again: it is posted once more, some time later, in whatever order.
    """

    refused: float = 0.0
    halved: float = 0.0
    unanswered: float = 0.0
    late: float = 0.0
    again: float = 0.0


class Proxy:
    """Listens on a port of its own while the block lasts.

    Attributes:
        weather: what happens to posts from now on.
        acknowledged: (rank, step) -> loss, of all batches that the server has answered for.
        busy: posts that the server would not take at the time.
    """

    def __init__(self, port: int, seed: int) -> None:
        self.weather = Weather()
        self.acknowledged: dict[tuple[int, int], float] = {}
        self.busy = 0
        self._port = port
        self._chance = random.Random(f"proxy {seed}")
        self._lock = threading.Lock()
        self._again: list[tuple[list[str], bytes]] = []
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._accept, self._repeat)
        ]

    @property
    def url(self) -> str:
        """What ranks are given as the server."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Proxy:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._listener.close()

    def calm(self) -> None:
        """Nothing happens any more, and what was to be posted again is."""
        self.weather = Weather()
        while self._repeat_one():
            pass

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(_SECONDS)
        with connection, connection.makefile("rb") as received:
            try:
                while self._pass_on(connection, received):
                    pass
            except (OSError, http.client.HTTPException, ValueError):
                return  # as a broken cable would

    def _pass_on(self, connection: socket.socket, received: io.BufferedReader) -> bool:
        head = _head(received)
        if not head:
            return False
        length = next(int(h.partition(":")[2]) for h in head if h.lower().startswith("content-le"))
        body: bytes = received.read(length)
        if len(body) < length:
            return False
        with self._lock:
            w, draw = self.weather, self._chance.random
            refused, halved, unanswered = (draw() < p for p in (w.refused, w.halved, w.unanswered))
            pause = 2 * draw() if draw() < w.late else 0.0
            if draw() < w.again:
                self._again.append((head, body))
        time.sleep(pause)
        if refused:
            return False
        if halved:
            with socket.create_connection(("127.0.0.1", self._port), timeout=_SECONDS) as half:
                half.sendall("\r\n".join([*head, "", ""]).encode() + body[: length // 2])
            return False
        status, answer = self._post(head, body)
        if unanswered:
            return False
        lines = [f"HTTP/1.1 {status} -", "content-type: application/json"]
        lines += [f"retry-after: {answer[1]}"] if answer[1] else []
        lines += [f"content-length: {len(answer[0])}", "", ""]
        connection.sendall("\r\n".join(lines).encode() + answer[0])
        return True

    def _post(self, head: list[str], body: bytes) -> tuple[int, tuple[bytes, str | None]]:
        server = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_SECONDS)
        try:
            path = head[0].split(" ")[1]
            server.request("POST", path, body, {"Content-Type": wire.CONTENT_TYPE})
            reply = server.getresponse()
            text = reply.read()
        finally:
            server.close()
        if reply.status == 200:
            found = points_of(body)
            with self._lock:
                self.acknowledged.update(found)
        self.busy += reply.status == 429
        return reply.status, (text, reply.getheader("Retry-After"))

    def _repeat(self) -> None:
        while not self._over.wait(0.2):
            self._repeat_one()

    def _repeat_one(self) -> bool:
        with self._lock:
            if not self._again:
                return False
            head, body = self._again.pop(self._chance.randrange(len(self._again)))
        try:
            self._post(head, body)
        except (OSError, http.client.HTTPException):
            return True  # the rank posts it itself, until it is there
        return True


def points_of(body: bytes) -> dict[tuple[int, int], float]:
    """(rank, step) -> loss, of the bytes of a batch."""
    batch = wire.in_columns(wire.decode(body))
    column = batch.columns.get("loss")
    if column is None:
        return {}
    steps, values = column.steps.tolist(), column.values.tolist()
    return {(batch.rank, step): value for step, value in zip(steps, values, strict=True)}


def _head(received: io.BufferedReader) -> list[str]:
    lines: list[str] = []
    while line := received.readline(65536).decode("latin-1").rstrip("\r\n"):
        lines.append(line)
    return lines
