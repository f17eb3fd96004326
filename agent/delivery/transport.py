"""One request to the server, and what came of it as a value.

Bodies are not compressed: digests and sketches, nearly all of the bytes, shrink by 4 %, and the
kilobyte a second that scalars make is halved at 0.1 ms of the trainer's processor a batch. A server
that never unpacks cannot be made to unpack a bomb either.
"""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import ipaddress
import json
import math
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import metadata
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from rankscope.agent import wire
from rankscope.agent.delivery.http import NoReply, Poster, Reply, readable
from rankscope.agent.delivery.uploader import Uploader, UploaderLost, can_be_started

INGEST_PATH = "/api/v1/ingest"

# What a person has to put right first: the token, the address, a proxy. Nothing is wrong with the
# batch, so it is kept.
_MISDIRECTED = frozenset({401, 403, 404, 405, 407, 421})
# Of the other 4xx only these say "later"; the rest are final.
_LATER = frozenset({408, 425, 429})
_LONGEST_RETRY_AFTER = 600.0
# After an uploader was lost: until the next is started.
_AGAIN_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Accepted:
    """The server has the batch, now or since an earlier attempt."""

    answer: wire.Answer


@dataclass(frozen=True, slots=True)
class Away:
    """Nothing is wrong with the batch: try again later.

    Attributes:
        why: goes on after "the server ...:".
        retry_after: seconds that the server asks for, if it does.
        misdirected: a person has to do something first, so that hurry is of no use.
    """

    why: str
    retry_after: float | None = None
    misdirected: bool = False


@dataclass(frozen=True, slots=True)
class TooLarge:
    """The batch has to be split."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The server will never take this batch; `why` is its own explanation."""

    why: str


Outcome = Accepted | Away | TooLarge | Refused


class Transport:
    """Posts batches over one connection that is kept open; for one thread.

    Args:
        server: URL of the server, with the path it may have behind a proxy.
        token: bearer token.
        connect_timeout: seconds for a connection to come about.
        read_timeout: seconds for an answer.
        uploader_after: seconds after which a process of its own posts, once one post has been
            answered here; infinity for none. Whatever becomes of that process, posts go on.
        uploader_faults: contains what fails in dealing with it.
        uploader_lost: told in words, once, why posts are made here again.
    """

    def __init__(
        self,
        server: str,
        token: str | None,
        *,
        connect_timeout: float = 1.0,
        read_timeout: float = 3.0,
        uploader_after: float = math.inf,
        uploader_faults: AbstractContextManager[Any] | None = None,
        uploader_lost: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._connect_timeout = connect_timeout
        self._read_timeout = read_timeout
        headers = {
            "Content-Type": wire.CONTENT_TYPE,
            "User-Agent": f"rankscope-agent/{metadata.version('rankscope')}",
        }
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        self._address = (f"{server}{INGEST_PATH}", headers, _proxy(server))
        self._poster = Poster(*self._address)
        self._answered = False
        self._uploader: Uploader | None = None
        self._uploader_at = time.monotonic() + uploader_after
        self._contained = _Contained(self, uploader_faults or contextlib.nullcontext())
        self._uploader_lost = uploader_lost
        self._loss_told = False
        # Whether it has reached the server: it may be that only this process does.
        self._uploader_proven = False

    def post(self, body: bytes, *, at_most: float | None = None) -> Outcome:
        """Post one encoded batch.

        Args:
            body: as `wire.encode` made it.
            at_most: seconds that connecting and answering together may take, at the end.
        """
        connect, read = self._connect_timeout, self._read_timeout
        if at_most is not None:
            connect, read = min(connect, at_most / 3), min(read, at_most * 2 / 3)
            # The training is over: now it is to be quick.
            self._dismiss()
        reply = self._by_uploader(body, connect, read) if at_most is None else None
        if isinstance(reply, Reply) and not self._uploader_proven:
            self._uploader_proven = True
            self._poster.close()
        elif reply is None or not self._uploader_proven:
            unproven, reply = reply, self._poster.post(body, connect=connect, read=read)
            if isinstance(reply, Reply):
                self._answered = True
                if isinstance(unproven, NoReply):
                    self._lose(f"it does not reach the server: {unproven.why}", math.inf)
        return _meaning(reply)

    @property
    def busy(self) -> bool:
        """Whether a batch was left to the uploader the outcome of which has not been taken."""
        return self._uploader is not None and self._uploader.busy

    def leave(self, body: bytes) -> bool:
        """Leaves a batch to the uploader, without waiting for it; `outcome` tells what came of it.

        False where there is no uploader yet that is known to reach the server.
        """
        if not self._uploader_proven:
            return False
        with self._contained:
            uploader = self._uploader
            assert uploader is not None
            uploader.send(body, connect=self._connect_timeout, read=self._read_timeout)
        return self.busy

    def outcome(self) -> Outcome | None:
        """What came of the batch that was left to the uploader.

        None where that is not known: not yet (then `busy` is still true), or never, because the
        uploader was lost.
        """
        reply = None
        with self._contained:
            if self._uploader is not None and self._uploader.busy:
                reply = self._uploader.answer()
        return None if reply is None else _meaning(reply)

    def listen(self, seconds: float) -> None:
        """Returns after so long, or when the uploader has got an answer that is to be heard."""
        with self._contained:
            if self._uploader is not None:
                self._uploader.listen(seconds)

    def interrupt(self) -> None:
        """No waiting for the uploader any more; may be called from another thread."""
        # That it is lost then is nothing to tell of.
        self._loss_told = True
        uploader = self._uploader
        if uploader is not None:
            uploader.interrupt()

    def close(self) -> None:
        """Close the connection."""
        self._poster.close()
        self._dismiss()

    def forget(self) -> None:
        """This is a forked child: the uploader is to end with its parent, not with us."""
        if self._uploader is not None:
            self._uploader.forget()

    def _by_uploader(self, body: bytes, connect: float, read: float) -> Reply | NoReply | None:
        """What the uploader brought; None where this process has to post."""
        with self._contained:
            if self._uploader is None:
                if not self._answered or time.monotonic() < self._uploader_at:
                    return None
                self._uploader_at = math.inf
                if not can_be_started():
                    return None
                self._uploader = Uploader(*self._address)
                self._uploader.start()
            if self._uploader.ready():
                return self._uploader.post(body, connect=connect, read=read)
        return None

    def _lose(self, why: str, again_after: float) -> None:
        self._dismiss()
        self._uploader_at = time.monotonic() + again_after
        if not self._loss_told:
            self._loss_told = True
            self._uploader_lost(why)

    def _dismiss(self) -> None:
        uploader, self._uploader = self._uploader, None
        self._uploader_proven = False
        if uploader is not None:
            uploader.close()


class _Contained:
    """Nothing that fails in dealing with the uploader goes further, and then it is lost."""

    def __init__(self, transport: Transport, faults: AbstractContextManager[Any]) -> None:
        self._transport = transport
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
                again_after = _AGAIN_SECONDS if error.came_up else math.inf
                self._transport._lose(str(error), again_after)
                return True
            # An answer that was not read would be taken for that to the next post.
            self._transport._dismiss()
        return bool(self._faults.__exit__(kind, error, trace))


def _proxy(server: str) -> str | None:
    """The proxy that the environment names for a server."""
    parts = urlsplit(server)
    host = parts.hostname or ""
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy is None or _is_loopback(host) or urllib.request.proxy_bypass(host):
        return None
    return proxy


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _meaning(reply: Reply | NoReply) -> Outcome:
    if isinstance(reply, NoReply):
        return Away(reply.why)
    status, text = reply.status, reply.body
    if 200 <= status < 300:
        answer = _answer(text)
        if answer is None:
            return Away("something answers there, but no Rankscope server", misdirected=True)
        return Accepted(answer)
    if status == 413:
        return TooLarge()
    why = f"it answers {status}, {_problem(text)}"
    if status in _MISDIRECTED or 300 <= status < 400:
        return Away(why, misdirected=True)
    if 400 <= status < 500 and status not in _LATER:
        return Refused(why)
    return Away(why, retry_after=_retry_after(reply.retry_after))


def _answer(text: bytes) -> wire.Answer | None:
    """The answer of our server; None where it is somebody else's."""
    plain = _object(text)
    accepted, dense_until = plain.get("accepted"), plain.get("dense_until")
    if not isinstance(accepted, int):
        return None
    return wire.Answer(
        accepted=accepted,
        duplicate=plain.get("duplicate") is True,
        dense_until=dense_until if isinstance(dense_until, int) else None,
        hello_wanted=plain.get("hello_wanted") is True,
    )


def _problem(text: bytes) -> str:
    """What a problem+json body (RFC 9457) says; otherwise the beginning of the text."""
    plain = _object(text)
    said = plain.get("detail") or plain.get("title")
    if isinstance(said, str):
        return readable(said)
    return readable(text.decode("utf-8", "replace")) or "without a reason"


def _object(text: bytes) -> Mapping[str, Any]:
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return plain if isinstance(plain, dict) else {}


def _retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header: a number of seconds, or a date (RFC 9110, 10.2.3)."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            at = email.utils.parsedate_to_datetime(value)
        except ValueError:
            return None
        if at.tzinfo is None:
            at = at.replace(tzinfo=datetime.UTC)
        seconds = (at - datetime.datetime.now(datetime.UTC)).total_seconds()
    return min(max(0.0, seconds), _LONGEST_RETRY_AFTER) if seconds == seconds else None
