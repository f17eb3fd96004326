"""Which server evaluates which run: each run exactly one, another one once that server dies.

A server counts as alive as long as its own row says so, a few seconds ahead. A run whose server is
no longer alive is free for anybody to take, which raises the lease's number. A server that was only
suspended, and comes back, finds out by that number in the very transaction in which it would write.
All times are the database's, so that clocks of servers need not agree.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from hashlib import blake2b

from sqlalchemy import Connection, delete, select, update

from rankscope.server.storage import schema
from rankscope.server.storage.database import dialect

# How long a server that reports nothing more is waited for, and how often each renews its row.
SECONDS = 4.0
BEAT_SECONDS = 1.0
# Rows of servers that died without notice are kept for a while, for whoever looks for them.
_BURIED_SECONDS = 3600.0


class Lost(RuntimeError):
    """Another server evaluates the run now."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to evaluate a run."""

    run: int
    server: str
    number: int


def beat(connection: Connection, *, server: str) -> None:
    """Records that a server is alive."""
    t = schema.server
    clock = dialect.clock(connection)
    statement = dialect.insert(connection, t).values(id=server, until=clock + SECONDS)
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=[t.c.id], set_={"until": statement.excluded.until}
        )
    )
    connection.execute(delete(t).where(t.c.until < clock - _BURIED_SECONDS))


def living(connection: Connection) -> frozenset[str]:
    """Servers that are alive."""
    t = schema.server
    return frozenset(
        connection.scalars(select(t.c.id).where(t.c.until > dialect.clock(connection)))
    )


def holders(connection: Connection, *, runs: Collection[int]) -> dict[int, str]:
    """Which server holds each of some runs that are held, whether it is alive or not."""
    t = schema.lease
    rows = connection.execute(select(t.c.run, t.c.server).where(t.c.run.in_(runs)))
    return {row.run: row.server for row in rows if row.server}


def take(connection: Connection, *, run: int, server: str) -> Lease | None:
    """The lease of a run, if no server that is alive has it; does not wait for one who is at it."""
    t = schema.lease
    connection.execute(
        dialect.insert(connection, t)
        .values(run=run, server="", number=0)
        .on_conflict_do_nothing(index_elements=[t.c.run])
    )
    # SQLite has one writer at a time and knows no such lock.
    row = connection.execute(
        select(t).where(t.c.run == run).with_for_update(skip_locked=True)
    ).first()
    if row is None or (row.server not in ("", server) and row.server in living(connection)):
        return None
    made = Lease(run=run, server=server, number=row.number + 1)
    connection.execute(update(t).where(t.c.run == run).values(server=server, number=made.number))
    return made


def hold(connection: Connection, lease: Lease) -> None:
    """Makes sure that a lease still is what it was, until the end of the transaction.

    Raises:
        Lost: it is not.
    """
    t = schema.lease
    number = connection.scalar(select(t.c.number).where(t.c.run == lease.run).with_for_update())
    if number != lease.number:
        raise Lost(f"run {lease.run} has changed hands: {lease.number}, now {number}")


def release(connection: Connection, lease: Lease) -> None:
    """Gives a lease back; harmless where it is lost."""
    t = schema.lease
    connection.execute(
        update(t)
        .where(t.c.run == lease.run, t.c.number == lease.number)
        .values(server="", number=lease.number + 1)
    )


def leave(connection: Connection, *, server: str) -> None:
    """A server ends: what it still holds is anybody's at once."""
    connection.execute(delete(schema.server).where(schema.server.c.id == server))


def preferred(run: int, servers: Collection[str]) -> str:
    """Who of several servers should take a run: each about as many, and all agree who.

    Rendezvous hashing: where one goes, only its own runs change hands.
    """
    return max(servers, key=lambda one: blake2b(f"{run} {one}".encode(), digest_size=8).digest())
