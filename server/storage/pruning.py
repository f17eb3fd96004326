"""Deletes runs that nobody has heard of for long, with all that belongs to them."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Connection, Engine, Select, Table, delete, select, tuple_

from rankscope.server.storage import dialect, partitions, schema
from rankscope.server.storage.engine import reading, writing

# Rows of a transaction: batches that come meanwhile wait for it.
_ROWS = 2000


def belonging() -> list[Table]:
    """All tables whose rows belong to a run; their keys begin with it."""
    return [t for t in schema.metadata.sorted_tables if "run" in t.c]


def prune(engine: Engine, *, seconds: float) -> Iterator[str]:
    """Deletes the runs of which nothing was heard for so long; yields the id of each.

    In small transactions, so that servers go on meanwhile; what was cut off goes on when it is
    called again. A run that is heard of while it is deleted keeps what is left of it.
    """
    with reading(engine) as connection:
        old = connection.execute(_old(connection, seconds)).all()
    partitions.drop_whole(engine, {row.key for row in old})
    for row in old:
        if _delete(engine, row.key, seconds):
            yield row.id


def _delete(engine: Engine, run: int, seconds: float) -> bool:
    """Deletes one run; False where it was heard of again."""
    r, n = schema.run, schema.run_name
    # Last of all the run itself: else what was cut off could not be found again.
    for table in [*belonging(), None]:
        more = True
        while more:
            with writing(engine) as connection:
                held = _old(connection, seconds).where(r.c.key == run).with_for_update()
                if connection.execute(held).first() is None:
                    return False
                if table is not None:
                    more = _delete_some(connection, table, run)
                    continue
                connection.execute(delete(r).where(r.c.key == run))
                connection.execute(delete(n).where(n.c.key == run))
                more = False
    return True


def _delete_some(connection: Connection, table: Table, run: int) -> bool:
    """Deletes a part of what a table has of a run; whether there may be more."""
    keys = list(table.primary_key)
    part = select(*keys).where(table.c.run == run).order_by(*keys).limit(_ROWS)
    done = connection.execute(delete(table).where(table.c.run == run, tuple_(*keys).in_(part)))
    return done.rowcount == _ROWS


def _old(connection: Connection, seconds: float) -> Select[tuple[int, str]]:
    r = schema.run
    return (
        select(r.c.key, r.c.id)
        .where(r.c.last_seen_at < dialect.clock(connection) - seconds)
        .order_by(r.c.last_seen_at)
    )
