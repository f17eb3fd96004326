"""Brings a database to the schema that this server works with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine

import rankscope.migrations


class SchemaError(RuntimeError):
    """The database's schema is one that this server cannot work with."""


def config() -> Config:
    """Alembic's configuration: the revisions beside the installed package."""
    made = Config()
    # By path: an editable install has no single package directory that Alembic could resolve.
    folder = Path(rankscope.migrations.__file__ or "").parent
    made.set_main_option("script_location", str(folder).replace("%", "%%"))
    made.set_main_option("path_separator", "os")
    return made


@cache
def head() -> str:
    """The revision that this server works with."""
    found = ScriptDirectory.from_config(config()).get_current_head()
    assert found is not None
    return found


def current(engine: Engine) -> str | None:
    """The revision of a database; None for an empty one."""
    with engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def upgrade(engine: Engine, revision: str = "head") -> None:
    """Runs the revisions that a database lacks.

    Raises:
        SchemaError: it has one that is not known here: a newer server has migrated it.
    """
    check(engine)
    with _migrating(engine) as made:
        command.upgrade(made, revision)


def check(engine: Engine) -> None:
    """Says where a database is one of a newer server.

    Raises:
        SchemaError: it has a revision that is not known here.
    """
    check_revision(current(engine))


def check_revision(have: str | None) -> None:
    """As `check`, of a revision by its name; None: that of an empty database."""
    known = {s.revision for s in ScriptDirectory.from_config(config()).walk_revisions()}
    if have is not None and have not in known:
        raise SchemaError(
            f"the database has schema {have}, which this version of Rankscope does not know: a "
            "newer one has migrated it. Update Rankscope, or use another database."
        )


def downgrade(engine: Engine, revision: str) -> None:
    """Takes revisions back; `base` takes all of them, and the data with them."""
    with _migrating(engine) as made:
        command.downgrade(made, revision)


@contextmanager
def _migrating(engine: Engine) -> Iterator[Config]:
    made = config()
    with engine.connect() as connection:
        # Its time-outs and locks go with it, not back into the pool.
        connection.detach()
        made.attributes["connection"] = connection
        yield made
