"""Questions to the REST interface: paths, parameters and bodies; answers as dataclasses."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar
from urllib.parse import quote

from rankscope.client.errors import NotRankscope
from rankscope.client.http import Body, Fields, Http
from rankscope.client.reading import read

Model = TypeVar("Model")
Value = str | int | float | bool | Sequence[str] | Sequence[int] | None

API = "/api/v1"
# The longest page of most lists: fewer questions.
_PAGE = "500"


class Questions:
    """Asks a server, and reads its answers.

    Args:
        http: how it is asked.
    """

    def __init__(self, http: Http) -> None:
        self._http = http

    def one(
        self,
        kind: type[Model],
        method: str,
        path: str,
        query: Fields = (),
        *,
        body: Body | None = None,
    ) -> Model:
        """The answer of a route under /api/v1.

        Raises:
            ClientError: there is none, or it is an error.
        """
        answer = self._http.json(method, API + path, query, body=body)
        model: Model = self.read(kind, answer, path)
        return model

    def items(
        self, kind: type[Model], path: str, query: Fields = (), *, paged: bool = True
    ) -> Iterator[Model]:
        """The items of a list, page by page as they are read.

        Raises:
            ClientError: as `one`.
        """
        for page in self.pages(path, query, paged=paged):
            for item in page["items"]:
                yield self.read(kind, item, path)

    def pages(
        self, path: str, query: Fields = (), *, paged: bool = True
    ) -> Iterator[dict[str, Any]]:
        """The pages of a list, as the server gives them.

        Raises:
            ClientError: as `one`.
        """
        size = [("limit", _PAGE)] if paged else []
        cursor: Fields = ()
        while True:
            page = self._http.json("GET", API + path, [*query, *size, *cursor])
            if not isinstance(page.get("items"), list):
                raise self._unreadable(path, "it has no items")
            yield page
            if not page.get("next_cursor"):
                return
            cursor = [("cursor", page["next_cursor"])]

    def read(self, kind: Any, value: Any, path: str) -> Any:
        """A part of an answer as what it is.

        Raises:
            NotRankscope: it is not that.
        """
        try:
            return read(kind, value)
        except ValueError as error:
            raise self._unreadable(path, error) from error

    def _unreadable(self, path: str, why: object) -> NotRankscope:
        return NotRankscope(
            f"{self._http.address}: the answer to {path} cannot be read: {why}", 200
        )


def path_of(folder: str, name: str) -> str:
    """The path of something by its id.

    Raises:
        ValueError: no id is like that, and the address would be another one.
    """
    if name in ("", ".", ".."):
        raise ValueError(f"{name!r} is no id or name of anything on a server")
    return f"/{folder}/{quote(name, safe='')}"


def fields(**values: Value) -> Fields:
    """Parameters of a query, without those that are None."""
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        if value is not None:
            each = [value] if isinstance(value, str | int | float) else value
            found += [(name, _text(one)) for one in each]
    return found


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def given(**values: Any) -> dict[str, Any]:
    """Members of a body, without those that are None."""
    return {name: value for name, value in values.items() if value is not None}


def body_of(members: Mapping[str, Any]) -> Body:
    """A JSON body, as the server reads it: non-finite numbers are strings, times RFC 3339."""
    return Body(json.dumps(_plain(members)).encode("utf-8"))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
