"""How a revision is run: with an engine that the server hands over, or on its own to make one."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, text

from rankscope.server.storage.schema import metadata

# Two servers that start together must not migrate together; any number will do, if it is ours.
_LOCK = 0x72616E6B


def _run(connection: Connection) -> None:
    sqlite = connection.dialect.name == "sqlite"
    context.configure(
        connection=connection,
        target_metadata=metadata,
        # SQLite cannot alter a table: Alembic copies it instead.
        render_as_batch=sqlite,
        transaction_per_migration=True,
        compare_server_default=False,
    )
    if not sqlite:
        # A migration that cannot have its locks soon gives up rather than stop all ingest.
        connection.execute(text("SET lock_timeout = '10s'"))
        connection.execute(text("SET statement_timeout = '10min'"))
        connection.execute(text("SELECT pg_advisory_lock(:lock)"), {"lock": _LOCK})
        connection.commit()
    try:
        with context.begin_transaction():
            context.run_migrations()
    finally:
        if not sqlite:
            connection.rollback()
            connection.execute(text("SELECT pg_advisory_unlock(:lock)"), {"lock": _LOCK})
            connection.commit()


_run(context.config.attributes["connection"])
