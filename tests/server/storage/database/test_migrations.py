"""The history of the schema: one head, up, down, and what it makes is what the code expects."""

import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text

from rankscope.server.storage.database import migrate
from rankscope.server.storage.database.engine import open_engine
from rankscope.server.storage.schema import metadata


def test_there_is_one_head():
    assert len(ScriptDirectory.from_config(migrate.config()).get_heads()) == 1


def test_up_makes_what_the_code_expects_and_down_takes_it_back(empty_database_url):
    engine = open_engine(empty_database_url)
    try:
        assert migrate.current(engine) is None
        migrate.upgrade(engine)
        assert migrate.current(engine) == migrate.head()
        migrate.upgrade(engine)  # nothing left to do
        with engine.connect() as connection:
            assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        migrate.downgrade(engine, "base")
        assert set(inspect(engine).get_table_names()) <= {"alembic_version"}
    finally:
        engine.dispose()


UPGRADE = """
import sys
from rankscope.server.storage.database import migrate
from rankscope.server.storage.database.engine import open_engine

engine = open_engine(sys.argv[1])
sys.stdin.readline()  # all at once
migrate.upgrade(engine)
print(migrate.current(engine))
"""


def test_servers_that_start_together_migrate_once(empty_database_url):
    # Processes, as Alembic cannot run twice in one.
    started = [
        subprocess.Popen(
            [sys.executable, "-c", UPGRADE, empty_database_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in started:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in started:
        out, err = process.communicate(timeout=60)
        assert out.strip() == migrate.head(), err


def test_a_newer_database_is_refused_with_a_hint(sqlite):
    with sqlite.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(migrate.SchemaError, match="9999.*Update Rankscope"):
        migrate.upgrade(sqlite)


def test_revisions_import_nothing_of_the_application():
    script = ScriptDirectory.from_config(migrate.config())
    for revision in script.walk_revisions():
        source = Path(revision.path).read_text()
        assert "import rankscope" not in source
        assert "from rankscope" not in source
