"""The cheapest server that can answer the agent: takes every post, keeps it, reads it at the end.

    python sink.py        prints its address; a line on stdin makes it report, and its end stops it

It runs at nice 19 in a process of its own and answers from a thread for each connection. A real
server on the same cores would take time from the ranks that is no cost of the agent.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from typing import Any

ANSWER = json.dumps(
    {"accepted": 1, "duplicate": False, "dense_until": None, "hello_wanted": False}
).encode()
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
RESPONSE = _HEAD % len(ANSWER) + ANSWER


def answer(connection: socket.socket, kept: list[bytes]) -> None:
    """Takes posts from one connection until it is closed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data = b""
    with connection:
        while True:
            while b"\r\n\r\n" not in data:
                more = connection.recv(1 << 20)
                if not more:
                    return
                data += more
            head, _, data = data.partition(b"\r\n\r\n")
            length = 0
            for line in head.split(b"\r\n")[1:]:
                name, _, value = line.partition(b":")
                if name.strip().lower() == b"content-length":
                    length = int(value)
            parts, have = [data], len(data)
            while have < length:
                more = connection.recv(1 << 20)
                if not more:
                    return
                parts.append(more)
                have += len(more)
            data = b"".join(parts)
            kept.append(data[:length])
            data = data[length:]
            connection.sendall(RESPONSE)


def report(kept: list[bytes]) -> dict[str, Any]:
    """What was posted: posts, bytes, points and faults of each run, and the agent's own series.

    The series `rankscope/...` are of rank 0; only their last values count, for there the schedule
    has long come to rest.
    """
    from rankscope.agent import wire

    runs: dict[str, dict[str, Any]] = {}
    for body in kept:
        batch = wire.decode(body)
        run = runs.setdefault(
            batch.run, {"posts": 0, "bytes": 0, "points": 0, "dropped": {}, "faults": [], "own": {}}
        )
        run["posts"] += 1
        run["bytes"] += len(body)
        run["points"] += batch.points
        run["dropped"] |= dict(batch.dropped)
        run["faults"] += [e.text[:300] for e in batch.events if e.kind == "agent.fault"]
        if batch.rank == 0:
            for name, column in batch.columns.items():
                if name.startswith("rankscope/") and len(column.values):
                    run["own"][name] = float(column.values[-1])
    return runs


def main() -> None:
    """Serves until stdin ends."""
    os.nice(19)
    kept: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=answer, args=(connection, kept), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    for _ in sys.stdin:
        print(json.dumps(report(kept)), flush=True)


if __name__ == "__main__":
    main()
