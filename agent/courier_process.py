"""The courier's process: posts what it is handed, until the other end of its socket is closed.

Run by path with the folder of urllib3 as its argument, never imported: so it needs neither the
environment nor the start-up files of the trainer's interpreter, and a tenth of its memory.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Leaves the process that started it, and serves the socket that is its standard input."""
    # A launcher that ends a job signals the whole group, and the trainer's last words come then:
    # they are to be posted. The end of the socket is what ends us.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The trainer must find no child that it has not made, neither while it waits for its own nor
    # as a zombie.
    if os.fork():
        os._exit(0)
    sys.path.append(sys.argv[1])
    posting = _beside("posting")
    with socket.socket(fileno=0) as connection, contextlib.suppress(OSError, EOFError):
        _serve(connection, posting)


def _serve(connection: socket.socket, posting: Any) -> None:
    address = json.loads(_received(connection, *struct.unpack("<I", _received(connection, 4))))
    poster = posting.Poster(address["url"], address["headers"], address["proxy"])
    # Only now: to start at the lowest priority takes seconds on a busy machine.
    os.nice(19)
    connection.sendall(b"!")
    while True:
        connect, read, length = struct.unpack("<ddQ", _received(connection, 24))
        reply = poster.post(_received(connection, length), connect=connect, read=read)
        if isinstance(reply, posting.NoReply):
            status, retry_after, body = 0, "", reply.why.encode()
        else:
            status, retry_after, body = reply.status, reply.retry_after or "", reply.body
        header = retry_after.encode("latin-1", "replace")
        connection.sendall(struct.pack("<III", status, len(header), len(body)) + header + body)


def _received(connection: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    left = memoryview(data)
    while left:
        count = connection.recv_into(left)
        if not count:
            raise EOFError
        left = left[count:]
    return bytes(data)


def _beside(name: str) -> Any:
    """A module of this folder, without the package around it."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
