"""The uploader's process: posts what it is sent, until the other end of its socket is closed.

Run by path and never imported by it, with the folder of urllib3 and the trainer's process id: so it
needs neither the environment nor the start-up files of the trainer's interpreter, and a tenth of
its memory.
"""

import os

if __name__ == "__main__":
    # Before anything else, for until then it is a child of the trainer, which must find none that
    # it has not made: neither while it waits for its own nor as a zombie.
    starter = os.getpid()
    if os.fork():
        os._exit(0)

import contextlib
import importlib.util
import json
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

# A launcher that ends or requeues a job signals the whole group, and then the trainer's exit report
# is to be posted. The end of the socket is what ends us.
_IGNORED = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1),
    *(signal.SIGUSR2, signal.SIGALRM, signal.SIGPIPE),
)


def main(starter: int, library: str, trainer: int) -> None:
    """Serves the sockets that are the standard input (requests) and output (the wake-up socket).

    Args:
        starter: the process that this one was forked from, which ends at once.
        library: folder of urllib3.
        trainer: process id of the trainer.
    """
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    while os.getppid() == starter:
        time.sleep(0.001)
    if os.getppid() == trainer:
        return  # it adopts orphans: it would have a child after all
    sys.path.append(library)
    http = _http()
    with (
        socket.socket(fileno=0) as connection,
        socket.socket(fileno=1) as wake_up,
        contextlib.suppress(OSError, EOFError),
    ):
        _serve(connection, wake_up, http)


def _serve(connection: socket.socket, wake_up: socket.socket, http: Any) -> None:
    (length,) = struct.unpack("<I", _received(connection, 4))
    address = json.loads(_received(connection, length))
    client = http.HttpClient(address["url"], address["headers"], address["proxy"])
    # Only now: to start at the lowest priority takes seconds on a busy machine.
    os.nice(19)
    connection.sendall(b"!")
    wake_up.setblocking(False)
    said_before: object = None
    while True:
        connect, read, length = struct.unpack("<ddQ", _received(connection, 24))
        reply = client.post(_received(connection, length), connect=connect, read=read)
        if isinstance(reply, http.NoReply):
            status, retry_after, body = 0, "", reply.why.encode()
        else:
            status, retry_after, body = reply.status, reply.retry_after or "", reply.body
        header = retry_after.encode("latin-1", "replace")
        connection.sendall(struct.pack("<III", status, len(header), len(body)) + header + body)
        said = _said(status, body)
        if said is None or said != said_before:
            # One that nobody has listened to for long is full, and wakes up its listener anyway.
            with contextlib.suppress(BlockingIOError):
                wake_up.send(b"!")
        said_before = said


def _said(status: int, body: bytes) -> object:
    """What an answer says beside "accepted"; None where it is to be heard in any case."""
    if not 200 <= status < 300:
        return None
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or said.pop("accepted", None) is None:
        return None
    return said


def _received(connection: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    left = memoryview(data)
    while left:
        count = connection.recv_into(left)
        if not count:
            raise EOFError
        left = left[count:]
    return bytes(data)


def _http() -> Any:
    """The module `http` of this folder, without the package around it.

    Under a name of its own: `http` alone is the standard library's, which it imports.
    """
    name = "rankscope_http"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("http.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(starter, sys.argv[1], int(sys.argv[2]))
