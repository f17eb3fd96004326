"""HTTP posts to one address over one connection that is kept open, and nothing more.

It knows nothing of batches, and imports little and nothing of ours: the uploader's process loads it
without the rest of the package.
"""

from __future__ import annotations

import http.client
import io
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import urllib3
import urllib3.connection

# Our answers have some hundred bytes; a page of another service may have any size.
LARGEST_ANSWER = 64 * 1024
_CLOSED = "it closed the connection without an answer"


@dataclass(frozen=True, slots=True)
class Reply:
    """What was answered.

    Attributes:
        retry_after: the header of that name.
        body: its first bytes, at most one more than `LARGEST_ANSWER`.
    """

    status: int
    retry_after: str | None
    body: bytes


@dataclass(frozen=True, slots=True)
class NoReply:
    """Nothing was answered; `why` goes on after "the server ...:"."""

    why: str


class Poster:
    """Posts to one address; for one thread.

    Args:
        url: the address.
        headers: of each request.
        proxy: address of the proxy to go through.
    """

    def __init__(self, url: str, headers: Mapping[str, str], proxy: str | None) -> None:
        self._url = url
        self._headers = dict(headers)
        self._pool = (
            urllib3.PoolManager(num_pools=1, maxsize=1)
            if proxy is None
            else urllib3.ProxyManager(proxy, num_pools=1, maxsize=1)
        )
        # The key is the scheme; each of these knows how long a whole answer may take.
        self._pool.pool_classes_by_scheme = {"http": _HTTPPool, "https": _HTTPSPool}

    def post(self, body: bytes, *, connect: float, read: float) -> Reply | NoReply:
        """Posts a body.

        Args:
            body: the bytes.
            connect: seconds for a connection to come about.
            read: seconds for the whole answer.
        """
        outcome = self._post(body, connect, read)
        if isinstance(outcome, NoReply) and outcome.why == _CLOSED:
            # A kept connection that the server closed while it was idle; a new one tells more.
            outcome = self._post(body, connect, read)
        return outcome

    def close(self) -> None:
        """Closes the connection."""
        self._pool.clear()

    def _post(self, body: bytes, connect: float, read: float) -> Reply | NoReply:
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
            text = response.read(LARGEST_ANSWER + 1)
            if len(text) > LARGEST_ANSWER:
                response.close()
            response.release_conn()
        except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError) as error:
            return NoReply(_describe(error, connect, read))
        return Reply(response.status, response.headers.get("Retry-After"), text)


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


def readable(text: str) -> str:
    """The beginning of what a stranger said, for a terminal: no control characters, one line."""
    clean = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(clean.split())[:300]


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
    return readable(getattr(error, "strerror", None) or str(error) or type(error).__name__)
