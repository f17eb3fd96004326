"""PostgreSQL's own partitions: old runs go by dropping tables instead of deleting rows.

The tables that grow with the data are cut into ranges of runs. Keys of runs ascend with time, so
that a range is a stretch of time, and every primary key begins with the run already, as PostgreSQL
demands of the column that a table is cut by. Nothing else knows of it: queries name their run, and
PostgreSQL looks into the one partition that has it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from sqlalchemy import Connection, Engine, Table, func, select, text
from sqlalchemy.schema import CreateIndex

from rankscope.server.storage import schema
from rankscope.server.storage.database.engine import reading, writing

# Runs of a partition. Each query plan knows all partitions: hundreds are fine, thousands are not.
RUNS = 1000
# Partitions that are there before the first run of them is.
_AHEAD = 4
# Who waits for a table holds up all who come after.
_LOCK_SECONDS = 10

# What has rows for every run, but few: deleting them costs nothing.
SMALL = frozenset(
    {
        *("access_token", "alert", "alert_event", "attempt", "audit", "finding_check"),
        *("judged_by", "layout", "lease", "metric", "notification", "notification_target"),
        *("project_settings", "rollup_mark", "run", "run_name", "server", "silence", "snapshot"),
        *("taken", "tensor_table"),
    }
)


class NotPossible(RuntimeError):
    """The database cannot be cut into partitions, or distributed; nothing was changed."""


def large() -> list[Table]:
    """The tables that grow with the data."""
    return [t for t in schema.metadata.sorted_tables if t.name not in SMALL]


def partition(engine: Engine, *, runs: int = RUNS) -> list[str]:
    """Cuts the large tables into ranges of `runs` runs each; the rows that are there are the first.

    In one transaction, for which batches wait: each table is read once, to make sure that its rows
    are in their range. Called again, it makes the partitions that come next.

    Returns:
        Names of the tables that were cut now.

    Raises:
        NotPossible: the database is no PostgreSQL.
    """
    if engine.dialect.name != "postgresql":
        raise NotPossible(
            "only PostgreSQL has partitions; on SQLite `rankscope db prune` is enough"
        )
    with writing(engine) as connection:
        connection.execute(text(f"SET LOCAL lock_timeout = '{_LOCK_SECONDS}s'"))
        whole = [t for t in large() if not _is_cut(connection, t)]
        edge = (_newest(connection) // runs + 1) * runs + 1
        for table in whole:
            for statement in cut(connection, table, edge):
                connection.execute(text(statement))
        for table in large():
            _extend(connection, table, edge, runs)
    return [table.name for table in whole]


def cut(connection: Connection, table: Table, edge: int) -> Iterator[str]:
    """The statements that make a table its own first partition, of all runs before `edge`."""
    name, first = table.name, f"{table.name}_before_{edge}"
    indexes = sorted(table.indexes, key=lambda index: str(index.name))
    yield f'LOCK TABLE "{name}" IN ACCESS EXCLUSIVE MODE'
    yield f'ALTER TABLE "{name}" RENAME TO "{first}"'
    for taken in [str(table.primary_key.name), *(str(index.name) for index in indexes)]:
        yield f'ALTER INDEX "{taken}" RENAME TO "{taken}_before_{edge}"'
    yield (
        f'CREATE TABLE "{name}" (LIKE "{first}" INCLUDING DEFAULTS INCLUDING STORAGE) '
        "PARTITION BY RANGE (run)"
    )
    columns = ", ".join(f'"{column.name}"' for column in table.primary_key)
    yield f'ALTER TABLE "{name}" ADD CONSTRAINT "{table.primary_key.name}" PRIMARY KEY ({columns})'
    for index in indexes:
        yield str(CreateIndex(index).compile(dialect=connection.dialect))
    yield (
        f'ALTER TABLE "{name}" ATTACH PARTITION "{first}" FOR VALUES FROM (MINVALUE) TO ({edge})'
    )
    # For what nobody has made a partition for in time.
    yield f'CREATE TABLE "{name}_others" PARTITION OF "{name}" DEFAULT'


def extend(engine: Engine, *, runs: int = RUNS) -> None:
    """Makes the partitions that come next, where tables are cut; servers call it now and then."""
    if engine.dialect.name != "postgresql":
        return
    with reading(engine) as connection:
        beyond = _newest(connection) + 1
        short = [
            table
            for table in large()
            if _is_cut(connection, table)
            and max((high for *_, high in _ranges(connection, table)), default=0) < beyond + runs
        ]
    for table in short:
        with writing(engine) as connection:
            connection.execute(text(f"SET LOCAL lock_timeout = '{_LOCK_SECONDS}s'"))
            _extend(connection, table, beyond, runs)


def drop_whole(engine: Engine, runs: Collection[int]) -> list[str]:
    """Drops the partitions all of whose runs are among those that are to go; names of them."""
    if engine.dialect.name != "postgresql":
        return []
    dropped = []
    with writing(engine) as connection:
        connection.execute(text(f"SET LOCAL lock_timeout = '{_LOCK_SECONDS}s'"))
        r = schema.run
        for table in large():
            for name, low, high in _ranges(connection, table):
                lowest = r.c.key >= low if low is not None else r.c.key.is_not(None)
                there = set(connection.scalars(select(r.c.key).where(lowest, r.c.key < high)))
                # No run may begin in it any more.
                if there and there <= set(runs) and _newest(connection) >= high - 1:
                    connection.execute(text(f'DROP TABLE "{name}"'))
                    dropped.append(name)
    return dropped


def _extend(connection: Connection, table: Table, beyond: int, runs: int) -> None:
    ranges = _ranges(connection, table)
    # A range in which rows lie already, among the others, can have no partition any more.
    end = max([beyond, *(high for _, _, high in ranges)])
    while end < beyond + _AHEAD * runs:
        connection.execute(
            text(
                f'CREATE TABLE "{table.name}_from_{end}" PARTITION OF "{table.name}" '
                f"FOR VALUES FROM ({end}) TO ({end + runs})"
            )
        )
        end += runs


def _newest(connection: Connection) -> int:
    """The highest key that a run has."""
    return int(connection.scalar(select(func.max(schema.run_name.c.key))) or 0)


def _is_cut(connection: Connection, table: Table) -> bool:
    kind = connection.scalar(
        text("SELECT relkind FROM pg_class WHERE oid = to_regclass(:name)"), {"name": table.name}
    )
    return kind in ("p", b"p")


def _ranges(connection: Connection, table: Table) -> list[tuple[str, int | None, int]]:
    """Name, first key (None: no limit) and end of each partition but the default one."""
    rows = connection.execute(
        text(
            "SELECT c.relname, "
            "(regexp_match(pg_get_expr(c.relpartbound, c.oid), 'FROM \\(''?(\\d+)'))[1] AS low, "
            "(regexp_match(pg_get_expr(c.relpartbound, c.oid), 'TO \\(''?(\\d+)'))[1] AS high "
            "FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid "
            "WHERE i.inhparent = to_regclass(:name)"
        ),
        {"name": table.name},
    )
    return [
        (row.relname, None if row.low is None else int(row.low), int(row.high))
        for row in rows
        if row.high is not None
    ]
