"""Posts by a process of its own, so that the training does not wait for HTTP.

`Uploader` is that process, `UploaderSupervisor` decides when there is one.

A post takes a millisecond of Python. In the trainer's process that millisecond holds the
interpreter's lock, and takes a core from a step on a machine without a spare one; in a process of
the lowest priority it takes what is left over. A batch that is sent to it stays in the queue until
the server has acknowledged it: the uploader may die at any time.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import urllib3

from rankscope.agent.delivery.http import NoReply, Reply

_SCRIPT = Path(__file__).with_name("uploader_process.py")
_INTERPRETER = re.compile(r"(python|pypy)[0-9.]*[a-z]?")
# As its process has them.
_POST, _REPLY = struct.Struct("<ddQ"), struct.Struct("<III")
_RECEIVED_BYTES = 64 * 1024
_START_SECONDS = 30.0
# After an uploader was lost: until the next is started.
_AGAIN_SECONDS = 60.0
_WAKE_UP_BYTES = 4096  # more than a socket holds
# Added to what a request may take: at the lowest priority a busy machine makes it wait.
_PATIENCE_SECONDS = 1.0


class UploaderLost(Exception):
    """The process does not answer (any more); whether the server has the last post is open.

    Attributes:
        came_up: whether it has worked before; if not, another one would fare no better.
    """

    def __init__(self, why: str, *, came_up: bool) -> None:
        super().__init__(why)
        self.came_up = came_up


def can_be_started() -> bool:
    """Whether there is an interpreter to run it, and somebody to adopt it.

    A frozen application, or one that embeds Python, gives its own program as the interpreter: run
    for the uploader, it would start the trainer again. Process 1 of a container adopts orphans.
    """
    return (
        _INTERPRETER.fullmatch(Path(sys.executable or "").name) is not None
        and not getattr(sys, "frozen", False)
        and os.getpid() != 1
        and _SCRIPT.is_file()
    )


class Uploader:
    """A process that posts to one address; for one thread.

    Args:
        url: the address.
        headers: of each request.
        proxy: address of the proxy to go through.
    """

    def __init__(self, url: str, headers: Mapping[str, str], proxy: str | None) -> None:
        self._address = {"url": url, "headers": dict(headers), "proxy": proxy}
        self._socket: socket.socket | None = None
        self._wake_up: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._give_up = 0.0
        # For what was sent: how many seconds an answer may take, and when they are over.
        self._owed: tuple[float, float] | None = None

    @property
    def busy(self) -> bool:
        """Whether a body was sent the answer to which has not been taken."""
        return self._owed is not None

    def start(self) -> None:
        """Starts the process; the caller has an object to close by then, and a forked child too.

        Raises:
            UploaderLost: it cannot be started.
        """
        address = json.dumps(self._address).encode()
        self._give_up = time.monotonic() + _START_SECONDS
        try:
            self._socket, theirs = socket.socketpair()
            with theirs:
                self._wake_up, their_wake_up = socket.socketpair()
                # What it is given (a token) stands neither in its command line nor its environment.
                self._socket.settimeout(1.0)
                self._socket.sendall(struct.pack("<I", len(address)) + address)
                with their_wake_up:
                    self._process = _started(theirs, their_wake_up)
            # The process that was started leaves the uploader running, and ends.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
        except (OSError, subprocess.SubprocessError) as error:
            raise UploaderLost(f"it cannot be started ({error})", came_up=False) from error

    def ready(self) -> bool:
        """Whether it has come up; does not wait.

        Raises:
            UploaderLost: it never will.
        """
        if self._ready:
            return True
        try:
            connection = self._connected()
            connection.settimeout(0)
            if not connection.recv(1):
                raise EOFError("it closed its socket")
            self._ready = True
        except BlockingIOError:
            if time.monotonic() > self._give_up:
                why = f"it has not started within {_START_SECONDS:.0f} s"
                raise UploaderLost(why, came_up=False) from None
        except (OSError, EOFError) as error:
            raise UploaderLost(f"it ended while it started ({error})", came_up=False) from error
        return self._ready

    def post(self, body: bytes, *, connect: float, read: float) -> Reply | NoReply:
        """Has a body posted; see `HttpClient.post`.

        Args:
            body: the bytes.
            connect: seconds for a connection to come about.
            read: seconds for the whole answer.

        Raises:
            UploaderLost: it has ended or stands still; it is of no use any more.
        """
        self.send(body, connect=connect, read=read)
        reply = self._taken(wait=True)
        assert reply is not None
        return reply

    def send(self, body: bytes, *, connect: float, read: float) -> None:
        """As `post`, but leaves the answer to `answer`."""
        seconds = connect + read + _PATIENCE_SECONDS
        self._owed = seconds, time.monotonic() + seconds
        try:
            connection = self._connected()
            connection.settimeout(seconds)
            connection.sendall(_POST.pack(connect, read, len(body)) + body)
        except (OSError, EOFError) as error:
            raise _lost(error, seconds) from error

    def answer(self) -> Reply | NoReply | None:
        """The answer to what was sent; None where it is not there yet.

        Raises:
            UploaderLost: as with `post`.
        """
        return self._taken(wait=False)

    def listen(self, seconds: float) -> None:
        """Returns after so long, or when an answer comes that says other than the one before it.

        It also returns when the process has ended, or is not to be waited for any more.
        """
        wake_up = self._wake_up
        if wake_up is None or seconds <= 0:
            return
        try:
            wake_up.settimeout(seconds)
            if wake_up.recv(_WAKE_UP_BYTES):
                return
        except TimeoutError:
            return
        except OSError:
            pass
        # The socket is closed; who calls again and again must not keep the processor busy.
        time.sleep(min(seconds, 0.01))

    def interrupt(self) -> None:
        """Has whoever waits for it wait no longer; may be called from another thread."""
        for end in (self._socket, self._wake_up):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Lets it end."""
        self.forget()
        if self._process is not None and self._process.returncode is None:
            # It is still starting: neither a child nor a zombie is to stay.
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                self._process.kill()
                self._process.wait(0.1)

    def forget(self) -> None:
        """This is a forked child: lets go of the sockets alone."""
        for end in (self._socket, self._wake_up):
            if end is not None:
                end.close()

    def _connected(self) -> socket.socket:
        if self._socket is None:
            raise EOFError("it has not been started")
        return self._socket

    def _taken(self, *, wait: bool) -> Reply | NoReply | None:
        assert self._owed is not None
        seconds, until = self._owed
        left = max(0.0, until - time.monotonic())
        try:
            connection = self._connected()
            connection.settimeout(left if wait else 0.0)
            status, header, text = _reply(connection, until)
        except (OSError, EOFError) as error:
            if isinstance(error, BlockingIOError) and left:
                return None
            raise _lost(error, seconds) from error
        self._owed = None
        if not status:
            return NoReply(text.decode())
        return Reply(status, header.decode("latin-1") or None, text)


class UploaderSupervisor:
    """Starts an uploader when it is due, and does without one when it fails; for one thread.

    No failure of an uploader goes further: what it could not do, the caller has to do.

    Args:
        address: URL, headers and proxy, as for `Uploader`.
        after: seconds after which the first is started; infinity for none.
        faults: contains what fails in dealing with it, except that it is lost.
        on_lost: called once, with the reason as a text.

    Attributes:
        proven: it was seen to reach the server: it may be that only this process does.
    """

    def __init__(
        self,
        address: tuple[str, Mapping[str, str], str | None],
        *,
        after: float,
        faults: AbstractContextManager[Any],
        on_lost: Callable[[str], None],
    ) -> None:
        self._address = address
        self._start_at = time.monotonic() + after
        self._contained = _Contained(self, faults)
        self._on_lost = on_lost
        self._loss_reported = False
        self._uploader: Uploader | None = None
        self.proven = False

    @property
    def busy(self) -> bool:
        """Whether a body was sent to it the reply to which has not been taken."""
        return self._uploader is not None and self._uploader.busy

    def post(
        self, body: bytes, *, connect: float, read: float, may_start: bool
    ) -> Reply | NoReply | None:
        """Has a body posted, and waits for the reply; see `HttpClient.post`.

        Args:
            body: the bytes.
            connect: seconds for a connection to come about.
            read: seconds for the whole answer.
            may_start: one may be started, where none is.

        Returns:
            None where there is no uploader (yet), or where it was lost on the way.
        """
        with self._contained:
            if self._uploader is None:
                if not may_start or time.monotonic() < self._start_at:
                    return None
                self._start_at = math.inf
                if not can_be_started():
                    return None
                self._uploader = Uploader(*self._address)
                self._uploader.start()
            if self._uploader.ready():
                return self._uploader.post(body, connect=connect, read=read)
        return None

    def send(self, body: bytes, *, connect: float, read: float) -> bool:
        """As `post`, but leaves the reply to `answer`; False where it has to be posted here."""
        if not self.proven:
            return False
        with self._contained:
            uploader = self._uploader
            assert uploader is not None
            uploader.send(body, connect=connect, read=read)
        return self.busy

    def answer(self) -> Reply | NoReply | None:
        """The reply to what was sent.

        None where it is not known: not yet (then `busy` is still true), or never, because the
        uploader was lost.
        """
        with self._contained:
            if self._uploader is not None and self._uploader.busy:
                return self._uploader.answer()
        return None

    def listen(self, seconds: float) -> None:
        """Returns after so long, or when there is a reply that differs from the one before."""
        with self._contained:
            if self._uploader is not None:
                self._uploader.listen(seconds)

    def interrupt(self) -> None:
        """Ends all waiting for it; may be called from another thread."""
        # That it is lost then is nothing to report.
        self._loss_reported = True
        uploader = self._uploader
        if uploader is not None:
            uploader.interrupt()

    def lose(self, why: str, again_after: float = math.inf) -> None:
        """It is of no use; another one may be started `again_after` seconds later."""
        self.dismiss()
        self._start_at = time.monotonic() + again_after
        if not self._loss_reported:
            self._loss_reported = True
            self._on_lost(why)

    def dismiss(self) -> None:
        """Lets it end."""
        uploader, self._uploader = self._uploader, None
        self.proven = False
        if uploader is not None:
            uploader.close()

    def forget(self) -> None:
        """This is a forked child: the uploader is to end with its parent, not with us."""
        if self._uploader is not None:
            self._uploader.forget()


class _Contained:
    """Nothing that fails in dealing with the uploader goes further, and then it is lost."""

    def __init__(self, supervisor: UploaderSupervisor, faults: AbstractContextManager[Any]) -> None:
        self._supervisor = supervisor
        self._faults = faults

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None:
            return False
        with self._faults:
            if isinstance(error, UploaderLost):
                self._supervisor.lose(str(error), _AGAIN_SECONDS if error.came_up else math.inf)
                return True
            # An answer that was not read would be taken for that to the next post.
            self._supervisor.dismiss()
        return bool(self._faults.__exit__(kind, error, trace))


def _lost(error: Exception, seconds: float) -> UploaderLost:
    late = isinstance(error, TimeoutError | BlockingIOError)
    why = f"no answer of it within {seconds:.3g} s" if late else f"it has ended ({error})"
    return UploaderLost(why, came_up=True)


def _reply(connection: socket.socket, until: float) -> tuple[int, bytes, bytes]:
    """Status, header and text; once a part of them is there, the rest is waited for."""
    data = b""
    while True:
        # Nearly always all of it at once.
        part = connection.recv(_RECEIVED_BYTES)
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
        connection.settimeout(left)


def _started(its_end: socket.socket, its_wake_up: socket.socket) -> subprocess.Popen[bytes]:
    library = Path(urllib3.__file__).parents[1]
    # -I and -S: none of the trainer's start-up files and variables; -B: no files of ours. None of
    # the trainer's own output: a pipe that is read to the end must not wait for it.
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(_SCRIPT), str(library), str(os.getpid())],
        stdin=its_end.fileno(),
        stdout=its_wake_up.fileno(),
        stderr=subprocess.DEVNULL,
    )
