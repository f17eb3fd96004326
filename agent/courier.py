"""Posts by a process of their own, so that the trainer's threads do not wait for each other.

A post by HTTP takes a millisecond of Python. In the trainer's process that millisecond holds the
interpreter's lock, and takes a core from a step on a machine without a spare one; in a process of
the lowest priority it takes what is left over. What is handed to it remains the sender's until the
server has acknowledged it: the courier may die at any time.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import urllib3

from rankscope.agent.posting import NoReply, Reply

_SCRIPT = Path(__file__).with_name("courier_process.py")
# As its process has them.
_POST, _REPLY = struct.Struct("<ddQ"), struct.Struct("<III")
_ONCE = 64 * 1024
_START_SECONDS = 30.0
# Added to what a request may take: at the lowest priority a busy machine makes it wait.
_PATIENCE_SECONDS = 2.0


class CourierLost(Exception):
    """The process does not answer any more; whether the server has what it was given is open."""


def can_be_started() -> bool:
    """Whether there is an interpreter to run it.

    A frozen application, or one that embeds Python, gives its own program as the interpreter: run
    for the courier, it would start the trainer again.
    """
    name = Path(sys.executable or "").name
    return name.startswith(("python", "pypy")) and not getattr(sys, "frozen", False)


class Courier:
    """A process that posts to one address; for one thread.

    Args:
        url: the address.
        headers: of each request.
        proxy: address of the proxy to go through.

    Raises:
        OSError: no process can be started.
        subprocess.SubprocessError: the same.
    """

    def __init__(self, url: str, headers: Mapping[str, str], proxy: str | None) -> None:
        address = json.dumps({"url": url, "headers": dict(headers), "proxy": proxy}).encode()
        self._socket, theirs = socket.socketpair()
        self._ready = False
        self._give_up = time.monotonic() + _START_SECONDS
        try:
            with theirs:
                # What it is told (a token) stands neither in its command line nor its environment.
                self._socket.settimeout(1.0)
                self._socket.sendall(struct.pack("<I", len(address)) + address)
                self._process = _started(theirs)
        except BaseException:
            self._socket.close()
            raise

    def ready(self) -> bool:
        """Whether it has come up; does not wait.

        Raises:
            CourierLost: it never will.
        """
        if self._ready:
            return True
        try:
            if select.select([self._socket], [], [], 0)[0]:
                if not self._socket.recv(1):
                    raise EOFError("it closed its socket")
                self._ready = True
                # What was started has left that process behind, and ended.
                self._process.wait(1.0)
        except (OSError, ValueError, EOFError, subprocess.SubprocessError) as error:
            raise CourierLost(f"it ended while it started ({error})") from error
        if not self._ready and time.monotonic() > self._give_up:
            raise CourierLost(f"it has not started within {_START_SECONDS:.0f} s")
        return self._ready

    def post(self, body: bytes, *, connect: float, read: float) -> Reply | NoReply:
        """Has a body posted; see `Poster.post`.

        Args:
            body: the bytes.
            connect: seconds for a connection to come about.
            read: seconds for the whole answer.

        Raises:
            CourierLost: it has ended or stands still; it is of no use any more.
        """
        seconds = connect + read + _PATIENCE_SECONDS
        try:
            self._socket.settimeout(seconds)
            self._socket.sendall(_POST.pack(connect, read, len(body)) + body)
            status, header, text = self._reply(time.monotonic() + seconds)
        except TimeoutError as error:
            raise CourierLost(f"no answer of it within {seconds:.3g} s") from error
        except (OSError, EOFError) as error:
            raise CourierLost(f"it has ended ({error})") from error
        if not status:
            return NoReply(text.decode())
        return Reply(status, header.decode("latin-1") or None, text)

    def close(self) -> None:
        """Lets it end."""
        self._socket.close()
        if self._process.returncode is None:
            # It is still starting: neither a child nor a zombie is to stay.
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                self._process.kill()
                self._process.wait(0.1)

    def _reply(self, until: float) -> tuple[int, bytes, bytes]:
        """Status, header and text."""
        data = b""
        while True:
            # Nearly always all of it at once.
            part = self._socket.recv(_ONCE)
            if not part:
                raise EOFError("it closed its socket")
            data += part
            if len(data) >= _REPLY.size:
                status, of_header, of_text = _REPLY.unpack_from(data)
                after_header = _REPLY.size + of_header
                if len(data) >= after_header + of_text:
                    return status, data[_REPLY.size : after_header], data[after_header:]
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)


def _started(its_end: socket.socket) -> subprocess.Popen[bytes]:
    library = Path(urllib3.__file__).parents[1]
    # -I and -S: none of the trainer's start-up files and variables. Its output is nobody's: a pipe
    # that is read to the end must not wait for it.
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_SCRIPT), str(library)],
        stdin=its_end.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=os.sep,
    )
