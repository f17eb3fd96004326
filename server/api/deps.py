"""What routes ask for: the database, the run of the path, a page of a list.

A route opens its transaction itself, `with reading(engine)`, and is done with it when it returns.
As a dependency it would be kept until the answer is sent, which is for ever for a stream, and
requests that hold one while they wait for a thread would lock each other out.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Path, Query, Request
from sqlalchemy import Connection, Engine

from rankscope.agent import wire
from rankscope.server.api.guard import TOKEN
from rankscope.server.api.problems import Problem
from rankscope.server.storage.access.audit import Actor
from rankscope.server.storage.access.tokens import Token
from rankscope.server.storage.reading import runs

MAX_STEP = wire.limits.STEP.most
MAX_RANK = wire.limits.RANK.most
# A cursor has numbers, or a name: that of a series and a tensor, six characters for each as JSON.
_MAX_CURSOR = 8 * (wire.limits.NAME.most + wire.limits.TENSOR_NAME.most)
_MAX_INTEGER = 2**63 - 1

RunId = Annotated[str, Path(description="run id")]
Step = Annotated[int | None, Query(ge=0, le=MAX_STEP)]


async def _engine(request: Request) -> Engine:
    # No plain function: that would wait for one of the threads that answer queries.
    engine: Engine = request.app.state.engine
    return engine


Database = Annotated[Engine, Depends(_engine)]


def _actor(request: Request) -> Actor:
    token: Token | None = request.scope.get(TOKEN)
    origin = request.client.host if request.client is not None else ""
    return Actor(*(("", "") if token is None else (token.name, token.id)), origin)


By = Annotated[Actor, Depends(_actor)]
"""Who asks, for the audit log."""


def known_run(connection: Connection, run: str) -> Any:
    """The row of a run, or a problem that says where to look."""
    row = runs.find_run(connection, run)
    if row is None:
        alike = " or ".join(repr(one) for one in runs.similar(connection, run))
        meant = f"did you mean {alike}? " if alike else ""
        raise Problem(
            404,
            f"there is no run {run!r}; {meant}`rankscope runs` (GET /api/v1/runs) lists them",
        )
    return row


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a list: how long it may be, and what the one before ended with."""

    limit: int
    after: tuple[Any, ...] | None


def paging(
    *types: type | tuple[type, ...], usual: int = 100, most: int = 1000
) -> Callable[..., Page]:
    """A dependency that reads `limit` and `cursor`.

    Args:
        types: of what a page of this list ends with; several where that depends on its order.
        usual: length of a page where none is asked for.
        most: longest page that may be asked for.
    """

    def page(
        limit: Annotated[int, Query(ge=1, description="longest page")] = usual,
        cursor: Annotated[
            str | None,
            Query(description="next_cursor of the page before; opaque", max_length=_MAX_CURSOR),
        ] = None,
    ) -> Page:
        if limit > most:
            raise Problem(422, f"limit: is {limit}; a page of this list has at most {most} lines")
        if cursor is None:
            return Page(limit, None)
        try:
            after = json.loads(base64.urlsafe_b64decode(cursor.encode()))
            allowed = [one if isinstance(one, tuple) else (one,) for one in types]
            # Not `isinstance`: to that, true and false are integers.
            if not all(type(part) in of for part, of in zip(after, allowed, strict=True)):
                raise ValueError("not of our making")
            if any(isinstance(part, int) and abs(part) > _MAX_INTEGER for part in after):
                raise ValueError("too large")
            for part in after:
                if isinstance(part, str):
                    part.encode()  # halves of surrogate pairs are no text to a database
        except (ValueError, TypeError, binascii.Error, RecursionError) as error:
            raise Problem(422, "cursor: is no next_cursor of an answer of this list") from error
        return Page(limit, tuple(after))

    return page


def next_cursor(after: tuple[Any, ...] | None) -> str | None:
    """What the client hands back for the next page; None at the end."""
    if after is None:
        return None
    return base64.urlsafe_b64encode(json.dumps(after).encode()).decode()
