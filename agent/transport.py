"""One request to the server, and what came of it as a value.

Bodies are not compressed: digests and sketches, nearly all of the bytes, shrink by 4 %, and the
kilobyte a second that scalars make is halved at 0.1 ms of the trainer's processor a batch. A server
that never unpacks cannot be made to unpack a bomb either.
"""

from __future__ import annotations

import datetime
import email.utils
import http.client
import io
import ipaddress
import json
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any
from urllib.parse import urlsplit

import urllib3
import urllib3.connection

from rankscope.agent import wire

INGEST_PATH = "/api/v1/ingest"

# What a person has to put right first: the token, the address, a proxy. Nothing is wrong with the
# batch, so it is kept.
_MISDIRECTED = frozenset({401, 403, 404, 405, 407, 421})
# Of the other 4xx only these say "later"; the rest are final.
_LATER = frozenset({408, 425, 429})
_LONGEST_RETRY_AFTER = 600.0
# Our answers have some hundred bytes; a page of another service may have any size.
_LARGEST_ANSWER = 64 * 1024
_CLOSED = "it closed the connection without an answer"


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
    """

    def __init__(
        self,
        server: str,
        token: str | None,
        *,
        connect_timeout: float = 1.0,
        read_timeout: float = 3.0,
    ) -> None:
        self._url = f"{server}{INGEST_PATH}"
        self._connect_timeout = connect_timeout
        self._read_timeout = read_timeout
        self._headers = {
            "Content-Type": wire.CONTENT_TYPE,
            "User-Agent": f"rankscope-agent/{metadata.version('rankscope')}",
        }
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._pool = _pool(server)
        # The key is the scheme; each of these knows how long a whole answer may take.
        self._pool.pool_classes_by_scheme = {"http": _HTTPPool, "https": _HTTPSPool}

    def post(self, body: bytes, *, at_most: float | None = None) -> Outcome:
        """Post one encoded batch.

        Args:
            body: as `wire.encode` made it.
            at_most: seconds that connecting and answering together may take, where less than usual.
        """
        outcome = self._post(body, at_most)
        if isinstance(outcome, Away) and outcome.why == _CLOSED:
            # A kept connection that the server closed while it was idle; a new one tells more.
            outcome = self._post(body, at_most)
        return outcome

    def close(self) -> None:
        """Close the connection."""
        self._pool.clear()

    def _post(self, body: bytes, at_most: float | None) -> Outcome:
        connect, read = self._connect_timeout, self._read_timeout
        if at_most is not None:
            connect, read = min(connect, at_most / 3), min(read, at_most * 2 / 3)
        try:
            response = self._pool.request(
                "POST",
                self._url,
                body=body,
                headers=self._headers,
                timeout=urllib3.Timeout(connect=connect, read=read),
                retries=False,
                redirect=False,
                preload_content=False,
            )
            text = response.read(_LARGEST_ANSWER + 1)
            if len(text) > _LARGEST_ANSWER:
                response.close()
            response.release_conn()
        except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError) as error:
            return Away(_describe(error, connect, read))
        return _outcome(response.status, response.headers, text)


class _Bounded(io.RawIOBase):
    """What a server sends, for so long as its socket's timeout says, all in all.

    The timeout of a socket begins anew with each byte; a server that sends a byte a second would
    keep the sender for ever.
    """

    def __init__(self, raw: Any, socket: Any) -> None:
        self._raw = raw
        self._socket = socket
        self._seconds = socket.gettimeout()
        self._until = time.monotonic() + (self._seconds or 0.0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self._seconds is not None:
            left = self._until - time.monotonic()
            if left <= 0:
                raise TimeoutError("the answer took too long")
            self._socket.settimeout(left)
        found: int | None = self._raw.readinto(buffer)
        return found

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Answer(http.client.HTTPResponse):
    def __init__(self, sock: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_Bounded(self.fp.detach(), sock))


class _HTTPConnection(urllib3.connection.HTTPConnection):
    response_class = _Answer


class _HTTPSConnection(urllib3.connection.HTTPSConnection):
    response_class = _Answer


class _HTTPPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _HTTPConnection


class _HTTPSPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _HTTPSConnection


def _pool(server: str) -> urllib3.PoolManager:
    """The pool for a server, through the proxy that the environment names for it."""
    parts = urlsplit(server)
    host = parts.hostname or ""
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy is None or _is_loopback(host) or urllib.request.proxy_bypass(host):
        return urllib3.PoolManager(num_pools=1, maxsize=1)
    return urllib3.ProxyManager(proxy, num_pools=1, maxsize=1)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _describe(error: Exception, connect: float, read: float) -> str:
    match error:
        case urllib3.exceptions.NameResolutionError():
            return "its name is not known"
        case urllib3.exceptions.NewConnectionError() | urllib3.exceptions.ProxyError():
            return f"no connection ({_innermost(error)})"
        case urllib3.exceptions.ConnectTimeoutError():
            return f"no connection within {connect:.3g} s"
        case urllib3.exceptions.TimeoutError():
            return f"no answer within {read:.3g} s"
        case urllib3.exceptions.SSLError():
            return f"no secure connection ({_innermost(error)})"
        case urllib3.exceptions.ProtocolError() | http.client.HTTPException():
            return _CLOSED
    return _innermost(error)


def _innermost(error: BaseException) -> str:
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return _readable(getattr(error, "strerror", None) or str(error) or type(error).__name__)


def _outcome(status: int, headers: Mapping[str, str], text: bytes) -> Outcome:
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
    return Away(why, retry_after=_retry_after(headers.get("Retry-After")))


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
        return _readable(said)
    return _readable(text.decode("utf-8", "replace")) or "without a reason"


def _object(text: bytes) -> Mapping[str, Any]:
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return plain if isinstance(plain, dict) else {}


def _readable(text: str) -> str:
    # It goes to a terminal: no control characters of a stranger, no whole web page.
    clean = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(clean.split())[:300]


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
