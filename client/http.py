"""Requests to one server, over HTTP: what is sent, when it is sent again, what went wrong."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import urllib3

from rankscope.client.errors import NotRankscope, Unreachable, problem

# The first packet and two repetitions: what takes longer drops them.
_CONNECT_S = 5.0
# Who is to wait for longer is told so instead: a program that sleeps for minutes looks dead.
_LONGEST_PAUSE_S = 60.0
_LATER = (429, 503)

Fields = Sequence[tuple[str, str]]
"""Parameters of a query, in their order; a name may come several times."""


@dataclass(frozen=True, slots=True)
class Body:
    """What a request carries."""

    content: bytes
    content_type: str = "application/json"


class Http:
    """Asks one server.

    Args:
        address: its URL.
        token: bearer token, if the server wants one.
        timeout: seconds of silence after which a request is given up.
        retries: how often a request is sent again that the server was too busy for (429, 503): when
            the server says, else after 1, 2, 4 s and so on.

    Attributes:
        address: without a slash at the end.
    """

    def __init__(
        self, address: str, token: str | None = None, *, timeout: float = 30.0, retries: int = 0
    ) -> None:
        self.address = address.rstrip("/")
        self._timeout = timeout
        self._retries = retries
        self._headers = {"Accept": "application/json", "User-Agent": "rankscope"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        # What the server says of coming back is read here, not by urllib3: it would wait for hours.
        policy = urllib3.Retry(
            total=3, connect=0, read=0, other=0, redirect=3, respect_retry_after_header=False
        )
        self._pool = urllib3.PoolManager(retries=policy)

    def close(self) -> None:
        """Closes the connections that were kept open."""
        self._pool.clear()

    def json(
        self,
        method: str,
        path: str,
        query: Fields = (),
        *,
        body: Body | None = None,
        timeout: float | None = None,
        retries: int | None = None,
    ) -> dict[str, Any]:
        """The object that the server answers with; empty where it answers with nothing (204).

        Args:
            method: of HTTP.
            path: from the root of the server, with what needs it quoted.
            query: parameters.
            body: what is sent.
            timeout, retries: other ones than those of the client.

        Raises:
            ClientError: there is no answer, or it is an error.
        """
        answer = self._asked(method, path, query, body, timeout, retries)
        return {} if answer.status == 204 else self._object(answer, f"{method} {path}")

    def text(self, path: str) -> str:
        """What the server answers to GET, as text.

        Raises:
            ClientError: as `json`.
        """
        answer = self._asked("GET", path, (), None, None, None)
        if answer.status != 200:
            self._object(answer, f"GET {path}")
        return answer.data.decode("utf-8", "replace")

    def lines(self, path: str, *, timeout: float) -> Iterator[str]:
        """Lines of an answer that goes on, as they come; ends when the server ends it.

        Raises:
            ClientError: as `json`; `timeout` seconds have passed without a byte.
        """
        with self._errors():
            answer = self._pool.request(
                "GET",
                self.address + path,
                headers=self._headers | {"Accept": "text/event-stream"},
                timeout=_within(timeout),
                preload_content=False,
            )
        with answer, self._errors():
            if answer.status != 200:
                self._object(answer, f"GET {path}")
            rest = b""
            for part in answer.stream():
                *whole, rest = (rest + part).split(b"\n")
                for line in whole:
                    yield line.rstrip(b"\r").decode("utf-8", "replace")

    def _asked(
        self,
        method: str,
        path: str,
        query: Fields,
        body: Body | None,
        timeout: float | None,
        retries: int | None,
    ) -> urllib3.BaseHTTPResponse:
        url = self.address + path
        if query:
            url += "?" + urlencode(query)
        headers = dict(self._headers)
        if body is not None:
            headers["Content-Type"] = body.content_type
        tries = self._retries if retries is None else retries
        for number in range(tries + 1):
            with self._errors():
                answer = self._pool.request(
                    method,
                    url,
                    body=None if body is None else body.content,
                    headers=headers,
                    timeout=_within(self._timeout if timeout is None else timeout),
                )
            if answer.status not in _LATER or number == tries:
                break
            after = _retry_after(answer)
            pause = 2.0**number if after is None else after
            if pause > _LONGEST_PAUSE_S:
                break
            time.sleep(pause)
        return answer

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Errors of urllib3 as those of the client."""
        try:
            yield
        except urllib3.exceptions.HTTPError as error:
            # Of a repetition that was given up, what it was given up for.
            raise Unreachable(str(getattr(error, "reason", None) or error)) from error

    def _object(self, answer: urllib3.BaseHTTPResponse, what: str) -> dict[str, Any]:
        try:
            found = json.loads(answer.data)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            text = f"{self.address} answers something else than Rankscope would to {what}"
            raise NotRankscope(text, answer.status)
        if not 200 <= answer.status < 300:
            raise problem(answer.status, found, _retry_after(answer))
        return found


def _within(seconds: float) -> urllib3.Timeout:
    return urllib3.Timeout(connect=min(_CONNECT_S, seconds), read=seconds)


def _retry_after(answer: urllib3.BaseHTTPResponse) -> float | None:
    """Seconds from now, whether the header has those or a date."""
    header = answer.headers.get("Retry-After")
    if header is None:
        return None
    try:
        return float(urllib3.Retry().parse_retry_after(header))
    except urllib3.exceptions.InvalidHeader:
        return None
