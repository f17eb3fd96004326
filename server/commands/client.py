"""What commands that ask a server have in common: their arguments, the question, the exit codes."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from rankscope.agent import wire
from rankscope.client.errors import NotRankscope, Problem, Unreachable
from rankscope.client.http import Body, Http
from rankscope.client.questions import API, Questions, body_of, fields
from rankscope.server.which_server import add_server

OK, FAILED, USAGE, UNREACHABLE, UNKNOWN_RUN = 0, 1, 2, 3, 4

# Of refusals: the rest says that something failed. Without the right token it is the call that is
# wrong.
_CODES = {401: USAGE, 403: USAGE, 404: UNKNOWN_RUN}

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


class Server:
    """A server and who asks it; what is no answer is a refusal, with what it comes to."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self.http = Http(address, token)

    @property
    def address(self) -> str:
        """Its URL, without a slash at the end."""
        return self.http.address

    def get(
        self,
        path: str,
        query: Query | None = None,
        *,
        prefix: str = API,
        timeout: float = 30.0,
    ) -> dict[str, Any]:
        """JSON of a route under `prefix`, which may take `timeout` seconds.

        Raises:
            Refused: there is no answer, or it is an error.
        """
        with self._refusals():
            return self.http.json("GET", prefix + path, fields(**(query or {})), timeout=timeout)

    def send(self, batch: wire.Batch) -> dict[str, Any]:
        """What the server says to a batch.

        Raises:
            Refused: as `get`.
        """
        body = Body(wire.encode(batch), wire.CONTENT_TYPE)
        with self._refusals():
            return self.http.json("POST", f"{API}/ingest", body=body, timeout=60.0)

    def change(
        self, method: str, path: str, changes: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Has a route change something, and what it says to that; {} where it says nothing.

        Raises:
            Refused: as `get`.
        """
        body = None if changes is None else body_of(changes)
        with self._refusals():
            return self.http.json(method, f"{API}{path}", body=body)

    def items(self, path: str, query: Query | None = None) -> list[Any]:
        """All items of a list, page by page.

        Raises:
            Refused: as `get`.
        """
        with self._refusals():
            pages = Questions(self.http).pages(path, fields(**(query or {})))
            return [item for page in pages for item in page["items"]]

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """What goes wrong between client and server, as what it comes to for a command."""
        try:
            yield
        except Unreachable as error:
            text = (
                f"{self.address} does not answer: {str(error).rstrip('.')}. Is the server running?"
            )
            raise Refused(UNREACHABLE, text) from error
        except NotRankscope as error:
            text = f"{self.address} answers something else than Rankscope would"
            raise Refused(UNREACHABLE, text) from error
        except Problem as error:
            raise Refused(_CODES.get(error.status, FAILED), error.detail) from error


def parser(name: str, text: str, *, prints_json: bool = True) -> argparse.ArgumentParser:
    """A parser with the arguments that all of these commands have."""
    made = argparse.ArgumentParser(prog=f"rankscope {name}", description=text)
    add_server(made)
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
    return f"/runs/{quoted(run)}"


def quoted(text: str) -> str:
    """An id as a segment of a path."""
    return quote(text, safe="")


def command(function: Callable[[Sequence[str]], int]) -> Callable[[Sequence[str]], int]:
    """Of a command: what it is refused is a line on the error stream and an exit code."""

    @functools.wraps(function)
    def ended(argv: Sequence[str]) -> int:
        try:
            return function(argv)
        except Refused as refused:
            complain(str(refused))
            return refused.code

    return ended


def complain(text: str) -> None:
    """Says on the error stream what went wrong."""
    sys.stderr.write(f"rankscope: {text}\n")


def show(
    found: dict[str, Any],
    options: argparse.Namespace,
    lines: Callable[[dict[str, Any]], Iterable[str]],
) -> None:
    """Prints what was found: as JSON where `--json` is given, else as lines of text."""
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print(*lines(found), sep="\n")


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
