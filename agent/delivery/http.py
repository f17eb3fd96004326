"""HTTP posts to one address over one connection that is kept open, and nothing more.

It knows nothing of batches, and imports little and nothing of ours: the uploader's process loads it
without the rest of the package.

urllib3 connects (through a proxy, over TLS) and makes the first post of a connection. Beside a
training, which has the caches to itself, a post by it takes 0.8 ms of processor time, nearly all of
it for fetching code. So the posts after it repeat the first one's head with another length, and the
usual answer is read without a parser: 0.1 ms. Any other answer is left to `http.client`; where the
connection was closed, urllib3 makes the post again over a new one.
"""

from __future__ import annotations

import http.client
import io
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import urllib3
import urllib3.connection

# Our answers have some hundred bytes; a page of another service may have any size.
LARGEST_ANSWER = 64 * 1024
# Up to here the head and a body are put together.
_ONE_PIECE = 64 * 1024
_CLOSED = "it closed the connection without an answer"
# The head of an answer: accepted, of a stated length, over a connection that stays.
_OTHERS = (
    rb"(?:(?!connection:(?! *keep-alive *\r\n)|transfer-encoding:|content-|retry-after:)"
    rb"[!-9;-~]+:[^\r\n]*\r\n|content-type:[^\r\n]*\r\n)*"
)
_USUAL = re.compile(
    rb"HTTP/1\.1 200 [^\r\n]*\r\n%b"
    rb"content-length: *(\d{1,4}) *\r\n%b\r\n" % (_OTHERS, _OTHERS),
    re.IGNORECASE,
)
_END_OF_HEAD = re.compile(rb"\n\r?\n")
_LENGTH = re.compile(rb"(?<=\r\ncontent-length: )\d+(?=\r\n)", re.IGNORECASE)


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


class HttpClient:
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
        self._kept: _OpenConnection | None = None

    def post(self, body: bytes, *, connect: float, read: float) -> Reply | NoReply:
        """Posts a body.

        Args:
            body: the bytes.
            connect: seconds for a connection to come about.
            read: seconds for the whole answer.
        """
        kept, self._kept = self._kept, None
        if kept is not None and kept.usable:
            reply = kept.post(body, connect, read)
            if isinstance(reply, Reply):
                self._kept = kept
            if reply is not None:
                return reply
        outcome = self._post(body, connect, read)
        if kept is None and isinstance(outcome, NoReply) and outcome.why == _CLOSED:
            # A kept connection that the server closed while it was idle; a new one shows more.
            outcome = self._post(body, connect, read)
        return outcome

    def close(self) -> None:
        """Closes the connection."""
        kept, self._kept = self._kept, None
        if kept is not None:
            # The pool closes what it has once it is gone itself; an error may keep it for a while.
            kept.close()
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
            connection = response.connection  # once it is read to the end, there is none
            text = response.read(LARGEST_ANSWER + 1)
            if len(text) > LARGEST_ANSWER:
                response.close()
            response.release_conn()
        except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError) as error:
            return NoReply(_describe(error, connect, read))
        if isinstance(connection, _Remembering):
            self._kept = _OpenConnection.of(connection)
        return Reply(response.status, response.headers.get("Retry-After"), text)


class _OpenConnection:
    """A connection over which a post was made and answered.

    Attributes:
        usable: whether another one can be made: it is open, and nothing was received unasked.
    """

    def __init__(self, connection: _Remembering, before: bytes, after: bytes) -> None:
        self._connection = connection
        self._before, self._after = before, after  # of the length, in a request's head

    @classmethod
    def of(cls, connection: _Remembering) -> Self | None:
        """None where it was closed, or its request is not as expected."""
        parts = _LENGTH.split(connection.head)
        return cls(connection, *parts) if len(parts) == 2 and connection.sock is not None else None

    @property
    def usable(self) -> bool:
        # A server that is to close it may say so before (408), or what it says is no answer.
        return self._connection.sock is not None and self._connection.is_connected

    def close(self) -> None:
        """Closes it."""
        self._connection.close()

    def post(self, body: bytes, connect: float, read: float) -> Reply | NoReply | None:
        """As `HttpClient.post`; None where it was closed, and the post is to be made again."""
        sock = self._connection.sock
        head = b"%b%d%b" % (self._before, len(body), self._after)
        late = f"it did not take the batch within {connect:.3g} s"
        try:
            # As urllib3 does: to send takes no longer than to connect.
            sock.settimeout(connect)
            if len(body) <= _ONE_PIECE:
                sock.sendall(head + body)  # one packet, mostly
            else:
                sock.sendall(head)
                sock.sendall(body)
            late = _late(read)
            until = time.monotonic() + read
            sock.settimeout(read)
            data = b""
            while part := sock.recv(LARGEST_ANSWER):
                data += part
                usual = _USUAL.match(data)
                end = usual.end() + int(usual[1]) if usual else 0
                if usual and len(data) == end:
                    return Reply(200, None, data[usual.end() :])
                left = until - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                sock.settimeout(left)
                if len(data) > (end or LARGEST_ANSWER) or (not usual and _END_OF_HEAD.search(data)):
                    return self._unusual(data, surplus=usual is not None)
            raise EOFError
        except TimeoutError:
            self._connection.close()
            return NoReply(late)
        except (OSError, EOFError, http.client.HTTPException):
            # Closed while it was idle, mostly.
            self._connection.close()
            return None

    def _unusual(self, begun: bytes, *, surplus: bool) -> Reply:
        answer = _Answer(self._connection.sock, method="POST", begun=begun)
        try:
            answer.begin()
            text = answer.read(LARGEST_ANSWER + 1)
            ended = answer.isclosed()
            if not (ended or answer.length is None or len(text) > LARGEST_ANSWER):
                raise EOFError  # it broke off
            if answer.headers.get("Content-Encoding", "identity") != "identity":
                raise EOFError  # nobody asked for that, and urllib3 knows what to do with it
            if surplus or not ended or answer.will_close:
                self._connection.close()
            return Reply(answer.status, answer.headers.get("Retry-After"), text)
        finally:
            answer.close()


class _Bounded(io.RawIOBase):
    """What a server sends, for so long as its socket's timeout says, all in all.

    The timeout of a socket begins anew with each byte; a server that sends a byte a second would
    keep the sender for ever.

    Args:
        begun: what was received before.
    """

    def __init__(self, raw: Any, socket: Any, begun: bytes) -> None:
        self._raw = raw
        self._begun = begun
        self._socket = socket
        self._seconds = socket.gettimeout()
        self._until = time.monotonic() + (self._seconds or 0.0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self._begun:
            count = min(len(buffer), len(self._begun))
            buffer[:count], self._begun = self._begun[:count], self._begun[count:]
            return count
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
    def __init__(self, sock: Any, *args: Any, begun: bytes = b"", **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_Bounded(self.fp.detach(), sock, begun))


class _Remembering(urllib3.connection.HTTPConnection):
    """Knows the head of its last request, as it was sent."""

    response_class = _Answer
    head = b""

    def putrequest(self, *args: Any, **kwargs: Any) -> None:
        self.head = b""
        super().putrequest(*args, **kwargs)

    def send(self, data: Any) -> None:
        # The head goes in one piece, and first.
        self.head = self.head or data
        super().send(data)


class _HTTPConnection(_Remembering):
    pass


class _HTTPSConnection(_Remembering, urllib3.connection.HTTPSConnection):
    pass


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
            return _late(read)
        case urllib3.exceptions.SSLError():
            return f"no secure connection ({_innermost(error)})"
        case urllib3.exceptions.ProtocolError() | http.client.HTTPException():
            return _CLOSED
    return _innermost(error)


def _late(read: float) -> str:
    return f"no answer within {read:.3g} s"


def _innermost(error: BaseException) -> str:
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return readable(getattr(error, "strerror", None) or str(error) or type(error).__name__)
