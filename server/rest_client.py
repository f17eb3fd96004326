"""The client of the REST interface: which server is asked, and how."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import urllib3

DEFAULT_SERVER = "http://127.0.0.1:8642"
# The first packet and two repetitions: what takes longer drops them.
_CONNECT_S = 5.0


class NoAnswer(Exception):
    """A server cannot be reached, or does not answer in time; the text says why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server says.

    Attributes:
        status: of HTTP.
        body: the JSON object, None where it is anything else.
    """

    status: int
    body: dict[str, Any] | None


class RestClient:
    """Asks one server.

    Attributes:
        address: its URL, without a slash at the end.
        headers: of every request.
    """

    def __init__(self, address: str, token: str | None = None) -> None:
        self.address = address
        self.headers = {"Accept": "application/json", "User-Agent": "rankscope"}
        if token:
            self.headers["Authorization"] = f"Bearer {token}"
        # A refusal that says when to come back is an answer like others.
        retries = urllib3.Retry(
            total=3, connect=0, read=0, other=0, redirect=3, respect_retry_after_header=False
        )
        self._pool = urllib3.PoolManager(retries=retries)

    def ask(
        self, path: str, query: Sequence[tuple[str, str]] = (), *, timeout: float = 30.0
    ) -> Answer:
        """The answer to GET of a path of the server, within `timeout` seconds of silence.

        Raises:
            NoAnswer: there is none.
        """
        return self._answer("GET", path, timeout, fields=list(query), headers=self.headers)

    def post(self, path: str, body: bytes, content_type: str, *, timeout: float = 60.0) -> Answer:
        """The answer to POST, as `ask`.

        Raises:
            NoAnswer: there is none.
        """
        headers = {**self.headers, "Content-Type": content_type}
        return self._answer("POST", path, timeout, body=body, headers=headers)

    def _answer(self, method: str, path: str, timeout: float, **request: Any) -> Answer:
        within = urllib3.Timeout(connect=min(_CONNECT_S, timeout), read=timeout)
        try:
            answer = self._pool.request(method, self.address + path, timeout=within, **request)
        except urllib3.exceptions.HTTPError as error:
            # Of a repetition that was given up, what it was given up for.
            raise NoAnswer(str(getattr(error, "reason", None) or error)) from error
        try:
            body = json.loads(answer.data)
        except ValueError:
            body = None
        return Answer(answer.status, body if isinstance(body, dict) else None)


def add_server(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say which server is asked, and as whom."""
    parser.add_argument(
        "--server",
        type=_address,
        default=os.environ.get("RANKSCOPE_SERVER") or DEFAULT_SERVER,
        help=f"URL of the server; default: RANKSCOPE_SERVER, or {DEFAULT_SERVER}",
    )
    parser.add_argument(
        "--token",
        type=_token,
        default=os.environ.get("RANKSCOPE_TOKEN") or None,
        help="bearer token; default: RANKSCOPE_TOKEN",
    )


def _address(text: str) -> str:
    """The URL of a server, without a slash at its end."""
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no URL of a server; write it like {DEFAULT_SERVER}"
        )
    return text.rstrip("/")


def _token(text: str) -> str:
    """A token as a header can carry it; as the agent takes it."""
    token = text.strip()
    if not token.isascii() or any(c <= " " or c == "\x7f" for c in token):
        # Which it is stays unsaid: it is a secret.
        raise argparse.ArgumentTypeError(
            "a token is ASCII text without spaces; copy it again as it was made"
        )
    return token
