"""What goes wrong between a client and a server, as exceptions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ClientError(Exception):
    """A request did not get what it asked for; the text says why."""


class Unreachable(ClientError):
    """The server cannot be reached, or does not answer in time."""


class NotRankscope(ClientError):
    """What answers is no Rankscope server, or one whose answers this client cannot read.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class Problem(ClientError):
    """The server's answer is an error, described as RFC 9457 has it.

    Attributes:
        status: of HTTP.
        title: what the status means.
        detail: what is wrong, where, and what to do.
        body: the whole description; `errors` in it lists the fields that are wrong, if any.
        retry_after: seconds after which the server wants to be asked again, None where it does
            not say.
    """

    def __init__(self, status: int, body: Mapping[str, Any], retry_after: float | None) -> None:
        self.status = status
        self.title = str(body.get("title") or f"status {status}")
        self.detail = str(body.get("detail") or self.title)
        self.body = dict(body)
        self.retry_after = retry_after
        super().__init__(self.detail)


class NotAllowed(Problem):
    """There is no token, or not one with the right to do this (401, 403)."""


class NotFound(Problem):
    """There is no such run, alert, silence, project or target (404)."""


class TryLater(Problem):
    """The server is busy, or its database takes nothing just now (429, 503)."""


_KINDS: Mapping[int, type[Problem]] = {
    401: NotAllowed,
    403: NotAllowed,
    404: NotFound,
    429: TryLater,
    503: TryLater,
}


def problem(status: int, body: Mapping[str, Any], retry_after: float | None = None) -> Problem:
    """The exception for an answer that is an error."""
    return _KINDS.get(status, Problem)(status, body, retry_after)
