"""The audit log: administrative acts, each written in the transaction of the act itself.

So no act is without its entry, and no entry without its act. Entries are added and never changed;
who may write to the database itself may change them, as everything there.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, insert, select, tuple_

from rankscope.server.storage import schema

Act = Literal[
    "token.create",
    "token.revoke",
    "target.add",
    "target.remove",
    "run.delete",
    "baseline.mark",
    "baseline.unmark",
    "run.tags",
    "project.detectors",
    "silence.create",
    "silence.end",
    "alert.acknowledge",
    "alert.unacknowledge",
]


@dataclass(frozen=True, slots=True)
class Actor:
    """Who acts, and from where.

    Attributes:
        name: of the token; of a command that of the operating system's user; empty where the server
            asks for no token.
        token: id of the token; empty where there is none.
        origin: address of the client, or name of the host of a command.
    """

    name: str = ""
    token: str = ""
    origin: str = ""


# By its own rules: `rankscope serve --keep`.
SERVER = Actor(name="rankscope serve")


@dataclass(frozen=True, slots=True)
class Entry:
    """One act.

    Attributes:
        at: seconds since 1970.
        subject: what it was done to: id of a token, target, run, silence or alert, or a project.
        details: JSON-able; what was said or set.
    """

    id: str
    at: float
    act: Act
    by: Actor
    subject: str
    details: Mapping[str, Any]


def record(
    connection: Connection, by: Actor, act: Act, subject: str, details: Mapping[str, Any]
) -> None:
    """Adds an entry, in the transaction of what it speaks of."""
    connection.execute(
        insert(schema.audit).values(
            id=secrets.token_hex(16),
            at=time.time(),
            act=act,
            name=by.name,
            token=by.token,
            origin=by.origin,
            subject=subject,
            details=dict(details),
        )
    )


def entries(
    connection: Connection,
    *,
    limit: int,
    after: tuple[float, str] | None = None,
    act: Act | None = None,
) -> tuple[Sequence[Entry], tuple[float, str] | None]:
    """A page of entries, newest first, and where the next page begins.

    Args:
        after: what the page before ended with: (at, id).
        act: of this one alone.
    """
    a = schema.audit.c
    query = select(schema.audit).order_by(a.at.desc(), a.id.desc()).limit(limit + 1)
    if act is not None:
        query = query.where(a.act == act)
    if after is not None:
        query = query.where(tuple_(a.at, a.id) < after)
    found = [
        Entry(r.id, r.at, r.act, Actor(r.name, r.token, r.origin), r.subject, r.details)
        for r in connection.execute(query)
    ]
    more = len(found) > limit
    found = found[:limit]
    return found, (found[-1].at, found[-1].id) if more else None
