"""What routes ask for: the database, the run of the path, a page of a list."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Path, Query, Request
from sqlalchemy import Connection, Engine

from rankscope.server.api.problems import Problem
from rankscope.server.storage import runs


def _engine(request: Request) -> Engine:
    engine: Engine = request.app.state.engine
    return engine


def _connection(engine: Annotated[Engine, Depends(_engine)]) -> Iterator[Connection]:
    with engine.connect() as connection, connection.begin():
        yield connection


Database = Annotated[Engine, Depends(_engine)]
Reading = Annotated[Connection, Depends(_connection)]


def _run(run: Annotated[str, Path(description="run id")], connection: Reading) -> Any:
    row = runs.find_run(connection, run)
    if row is None:
        raise Problem(404, f"there is no run {run!r}; GET /api/v1/runs lists the runs there are")
    return row


RunRow = Annotated[Any, Depends(_run)]


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a list: how long it may be, and what the one before ended with."""

    limit: int
    after: tuple[Any, ...] | None


def _page(
    limit: Annotated[int, Query(ge=1, le=1000, description="longest page")] = 100,
    cursor: Annotated[
        str | None, Query(description="next_cursor of the page before; opaque")
    ] = None,
) -> Page:
    if cursor is None:
        return Page(limit, None)
    try:
        after = json.loads(base64.urlsafe_b64decode(cursor.encode()))
        if not isinstance(after, list) or len(after) != 2:
            raise ValueError("not of our making")
    except (ValueError, binascii.Error) as error:
        raise Problem(422, "cursor: is not the next_cursor of an answer of this list") from error
    return Page(limit, tuple(after))


Paging = Annotated[Page, Depends(_page)]


def next_cursor(after: tuple[Any, ...] | None) -> str | None:
    """What the client hands back for the next page; None at the end."""
    if after is None:
        return None
    return base64.urlsafe_b64encode(json.dumps(after).encode()).decode()
