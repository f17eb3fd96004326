"""How revisions are run: on a connection that `server.storage.migrate` hands over."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, text

from rankscope.server.storage.schema import metadata

# Any number will do, if it is ours alone.
_LOCK = 0x72616E6B


def _run(connection: Connection) -> None:
    sqlite = connection.dialect.name == "sqlite"
    if sqlite:
        # One transaction that begins with the right to write: of two servers that start together
        # one waits, and then finds nothing left to do.
        connection.execution_options(rankscope_writes=True)
    else:
        # The same by a lock of the connection. Who waits for it waits for a migration, as long as
        # that takes; a migration that waits for its own locks would stop all ingest meanwhile.
        connection.execute(text("SELECT pg_advisory_lock(:lock)"), {"lock": _LOCK})
        connection.execute(text("SET lock_timeout = '10s'"))
        connection.execute(text("SET statement_timeout = '10min'"))
        connection.commit()
    context.configure(
        connection=connection,
        target_metadata=metadata,
        # SQLite cannot alter a table: Alembic copies it instead.
        render_as_batch=sqlite,
        transaction_per_migration=not sqlite,
        # Alembic thinks that SQLite cannot; it can where Python does not interfere (`open_engine`).
        transactional_ddl=True,
        compare_server_default=False,
    )
    with context.begin_transaction():
        context.run_migrations()


_run(context.config.attributes["connection"])
