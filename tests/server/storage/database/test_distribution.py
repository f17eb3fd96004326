"""What Citus asks of tables that it distributes; a cluster is not at hand, its rules are."""

import pytest
from sqlalchemy import UniqueConstraint

from rankscope.server.commands.db import db
from rankscope.server.storage.database import distribution, migrate, partitions
from rankscope.server.storage.database.engine import open_engine
from rankscope.server.storage.maintenance import pruning
from rankscope.server.storage.schema import metadata

TABLES = sorted(metadata.tables)


def column_of(name):
    """The column that a table is distributed by."""
    return "key" if name == "run" else "run"


@pytest.mark.parametrize("name", [t for t in TABLES if t not in distribution.REFERENCE])
def test_whatever_is_unique_is_so_within_a_run(name):
    """Each node sees its own rows only: keys and unique constraints include the column."""
    table = metadata.tables[name]
    wanted = column_of(name)
    assert next(iter(table.primary_key)).name == wanted
    for constraint in table.constraints:
        if isinstance(constraint, UniqueConstraint):
            assert next(iter(constraint.columns)).name == wanted, constraint.name
    for index in table.indexes:
        assert not index.unique
    # A foreign key between tables that lie apart is refused.
    assert not table.foreign_keys
    # What lies together has keys of one type.
    assert str(table.c[wanted].type) == "BIGINT"


def test_every_table_goes_somewhere():
    named = " ".join(distribution.statements())
    for name in TABLES:
        assert f"('{name}'" in named


def test_what_is_executed():
    made = distribution.statements()
    assert made[:8] == [
        "SELECT create_reference_table('access_token')",
        "SELECT create_reference_table('alembic_version')",
        "SELECT create_reference_table('audit')",
        "SELECT create_reference_table('notification_target')",
        "SELECT create_reference_table('project_settings')",
        "SELECT create_reference_table('run_name')",
        "SELECT create_reference_table('server')",
        "SELECT create_distributed_table('run', 'key', colocate_with => 'none')",
    ]
    assert "SELECT create_distributed_table('chunk', 'run', colocate_with => 'run')" in made[8:]
    assert all("colocate_with => 'run')" in statement for statement in made[8:])
    # Called again it goes on where it was.
    assert distribution.statements([*distribution.REFERENCE, "run"]) == made[8:]
    assert distribution.statements([*distribution.REFERENCE, *TABLES]) == []


def test_without_citus_nothing_is_changed(database_url, capsys):
    assert db(["upgrade", "--db", database_url]) == 0
    assert db(["distribute", "--db", database_url]) == 2
    error = capsys.readouterr().err
    wanted = "Citus" if database_url.startswith("sqlite") else "CREATE EXTENSION citus"
    assert wanted in error
    engine = open_engine(database_url)
    assert migrate.current(engine) == migrate.head()
    engine.dispose()


def test_a_database_without_the_schema_is_not_touched(empty_database_url, capsys):
    assert db(["distribute", "--db", empty_database_url]) == 2
    assert "rankscope db upgrade" in capsys.readouterr().err


def test_every_table_is_small_or_cut():
    assert {t.name for t in partitions.large()} | partitions.SMALL >= set(TABLES)
    assert {t.name for t in partitions.large()} >= {"chunk", "layers", "fingerprint", "comparison"}
    for table in partitions.large():
        assert next(iter(table.primary_key)).name == "run"
        assert table in pruning.belonging()
