"""The tables on the nodes of a Citus cluster, each run on one of them.

Every table whose rows belong to a run is distributed by it, and all in the same way, so that
whatever belongs to one run lies together: a batch is stored, a run evaluated and a page drawn by
one node, within one transaction of PostgreSQL's. Questions over all runs (lists of runs and of
alerts, an alert by its id alone, which runs have new data) go to all nodes.

Names of runs, settings of projects, servers, the audit log and the schema's revision are small and
belong to none: every node has them.
"""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Engine, text

from rankscope.server.storage.database.engine import reading, writing
from rankscope.server.storage.database.partitions import NotPossible
from rankscope.server.storage.maintenance.pruning import belonging

_OLDEST = 12
REFERENCE = (
    "access_token",
    "alembic_version",
    "audit",
    "notification_target",
    "project_settings",
    "run_name",
    "server",
)


def statements(done: Collection[str] = ()) -> list[str]:
    """What is to be executed, in this order and in one transaction.

    Args:
        done: tables that are distributed already.
    """
    made = [f"SELECT create_reference_table('{name}')" for name in REFERENCE if name not in done]
    if "run" not in done:
        made.append("SELECT create_distributed_table('run', 'key', colocate_with => 'none')")
    made += [
        f"SELECT create_distributed_table('{table.name}', 'run', colocate_with => 'run')"
        for table in belonging()
        if table.name not in done
    ]
    return made


def distribute(engine: Engine) -> int:
    """Distributes what is not distributed yet, with the rows that are there; number of tables.

    Raises:
        NotPossible: there is no Citus, or too old a one. Nothing was changed.
    """
    if engine.dialect.name != "postgresql":
        raise NotPossible("only PostgreSQL with the extension Citus can be distributed")
    with reading(engine) as connection:
        version = connection.scalar(
            text("SELECT extversion FROM pg_extension WHERE extname = 'citus'")
        )
    if version is None:
        raise NotPossible(
            "this database does not have the extension Citus. Install it on all nodes, put it into "
            "shared_preload_libraries, and let a superuser call CREATE EXTENSION citus here"
        )
    if int(version.split(".")[0].split("-")[0]) < _OLDEST:
        raise NotPossible(f"this database has Citus {version}; {_OLDEST} or newer is needed")
    with writing(engine) as connection:
        done = set(
            connection.scalars(
                text("SELECT c.relname FROM citus_tables t JOIN pg_class c ON c.oid = t.table_name")
            )
        )
        todo = statements(done)
        # Reference tables and distributed ones in one transaction.
        connection.execute(text("SET LOCAL citus.multi_shard_modify_mode TO 'sequential'"))
        for statement in todo:
            connection.execute(text(statement))
    return len(todo)
