"""What commands that ask a server have in common: their arguments, the question, the exit codes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import urllib3

DEFAULT_SERVER = "http://127.0.0.1:8642"
OK, FAILED, USAGE, UNREACHABLE, UNKNOWN_RUN = 0, 1, 2, 3, 4

_MAX_WIDTH = 48

Query = Mapping[str, str | Sequence[str] | None]


class Refused(Exception):
    """The server does not answer, or says no.

    Attributes:
        code: the exit code that it comes to.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class Server:
    """A server and who asks it.

    Attributes:
        address: URL without a slash at its end.
        token: bearer token, or None.
    """

    address: str
    token: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Of every request."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def get(
        self,
        path: str,
        query: Query | None = None,
        *,
        prefix: str = "/api/v1",
        timeout: float = 30.0,
    ) -> dict[str, Any]:
        """JSON of a route under `prefix`, which may take `timeout` seconds.

        Raises:
            Refused: there is no answer, or it is an error.
        """
        fields: list[tuple[str, str]] = []
        for name, value in (query or {}).items():
            if value is not None:
                each = [value] if isinstance(value, str) else value
                fields += [(name, one) for one in each]
        try:
            answer = urllib3.request(
                "GET",
                f"{self.address}{prefix}{path}",
                fields=fields,
                headers=self.headers,
                timeout=timeout,
                retries=False,
            )
        except urllib3.exceptions.HTTPError as error:
            raise unreachable(self.address, error) from error
        return self.read(answer.status, answer.data)

    def read(self, status: int, data: bytes) -> dict[str, Any]:
        """The JSON of an answer.

        Raises:
            Refused: it is none of this server, or an error.
        """
        try:
            body = json.loads(data)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            text = f"{self.address} answers something else than Rankscope would"
            raise Refused(UNREACHABLE, text)
        if status != 200:
            code = UNKNOWN_RUN if status == 404 else FAILED
            raise Refused(code, str(body.get("detail", body)))
        return body

    def items(self, path: str, query: Query | None = None) -> list[Any]:
        """All items of a list, page by page.

        Raises:
            Refused: as `get`.
        """
        found: list[Any] = []
        cursor = None
        while True:
            page = self.get(path, {**(query or {}), "limit": "500", "cursor": cursor})
            found += page["items"]
            cursor = page["next_cursor"]
            if cursor is None:
                return found


def unreachable(address: str, error: Exception) -> Refused:
    """What there is to say where no answer came."""
    reason = str(getattr(error, "reason", None) or error).rstrip(".")
    return Refused(UNREACHABLE, f"{address} does not answer: {reason}. Is the server running?")


def parser(name: str, text: str, *, prints_json: bool = True) -> argparse.ArgumentParser:
    """A parser with the arguments that all of these commands have."""
    made = argparse.ArgumentParser(prog=f"rankscope {name}", description=text)
    made.add_argument(
        "--server",
        type=_address,
        default=os.environ.get("RANKSCOPE_SERVER") or DEFAULT_SERVER,
        help=f"URL of the server; default: RANKSCOPE_SERVER, or {DEFAULT_SERVER}",
    )
    made.add_argument(
        "--token",
        default=os.environ.get("RANKSCOPE_TOKEN"),
        help="bearer token; default: RANKSCOPE_TOKEN",
    )
    if prints_json:
        made.add_argument("--json", action="store_true", help="print what the server says as JSON")
    return made


def server_of(options: argparse.Namespace) -> Server:
    """The server that was asked for."""
    return Server(options.server, options.token)


def run_id(text: str) -> str:
    """A run's id: none of those that would make another path of the address."""
    if not text or text in (".", "..") or "/" in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no id of a run; `rankscope runs` lists the runs there are"
        )
    return text


def run_path(run: str) -> str:
    """Path of a run under /api/v1."""
    return f"/runs/{quote(run, safe='')}"


def complain(text: str) -> None:
    """Says on the error stream what went wrong."""
    sys.stderr.write(f"rankscope: {text}\n")


def table(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Lines of a table whose columns stand under each other."""
    # A name of 250 characters pushes its own line to the right, and no others.
    widths = [
        max((len(row[i]) for row in rows if len(row[i]) <= _MAX_WIDTH), default=0)
        for i in range(len(rows[0]))
    ]
    for row in rows:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(padded).rstrip()


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
