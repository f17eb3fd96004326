"""Old runs go, with all that belongs to them, and nothing else does."""

import itertools
import re
import threading
import time

import pytest
from sqlalchemy import func, inspect, select, text, update

from rankscope.server.commands.db import db
from rankscope.server.evaluation.worker import Worker
from rankscope.server.storage import schema
from rankscope.server.storage.database import partitions
from rankscope.server.storage.database.engine import open_engine, reading, writing
from rankscope.server.storage.ingest.batches import store_batch
from rankscope.server.storage.judgement.alerts import get_alert, list_alerts
from rankscope.server.storage.maintenance import pruning
from rankscope.server.storage.reading import runs
from tests.support.runs.fixture_run import SyntheticRun

DAY = 86400.0


def put(engine, name, *, days_ago, steps=40):
    run = SyntheticRun(run=name, ranks=2, steps=steps, desync=(1, 10), told=True)
    for batch in run.batches(size=5):
        with writing(engine) as connection:
            store_batch(connection, batch, received_at=time.time())
    worker = Worker(engine, threading.Event(), strict=True)
    worker.sweep()
    worker.stop()
    r = schema.run
    with writing(engine) as connection:
        connection.execute(
            update(r).where(r.c.id == name).values(last_seen_at=time.time() - days_ago * DAY)
        )
    with reading(engine) as connection:
        return runs.find_run(connection, name).key


def ids(found):
    return [run.id for run in found]


def counts(engine):
    """Rows of each table by run, of those that have any."""
    with reading(engine) as connection:
        return {
            (t.name, run): count
            for t in pruning.belonging()
            for run, count in connection.execute(select(t.c.run, func.count()).group_by(t.c.run))
        }


def test_old_runs_go_with_all_that_is_theirs(engine, monkeypatch):
    old = put(engine, "old", days_ago=100)
    young = put(engine, "young", days_ago=10)
    before = counts(engine)
    assert {run for _, run in before} == {old, young}
    monkeypatch.setattr(pruning, "_ROWS", 7)
    assert ids(pruning.prune(engine, seconds=90 * DAY)) == ["old"]
    assert counts(engine) == {k: n for k, n in before.items() if k[1] == young}
    with reading(engine) as connection:
        assert runs.find_run(connection, "old") is None
        assert runs.find_run(connection, "young") is not None
    # The name may be used again, and is another run.
    assert put(engine, "old", days_ago=0) not in (old, young)


def test_one_run_goes_with_all_that_is_its_own(engine, monkeypatch):
    gone, stays = put(engine, "gone", days_ago=0), put(engine, "stays", days_ago=0)
    before = counts(engine)
    monkeypatch.setattr(pruning, "_ROWS", 7)
    assert pruning.delete_run(engine, gone)
    assert counts(engine) == {k: n for k, n in before.items() if k[1] == stays}
    # Neither its name nor its key is known any more.
    with reading(engine) as connection:
        assert runs.find_run(connection, "gone") is None
    assert not pruning.delete_run(engine, gone)


def test_a_run_that_is_started_again_while_it_is_deleted_stays(engine, monkeypatch):
    key = put(engine, "again", days_ago=0)
    some = pruning._delete_some

    def start_again(connection, table, run):
        r = schema.run
        connection.execute(update(r).where(r.c.key == run).values(state="running"))
        return some(connection, table, run)

    monkeypatch.setattr(pruning, "_delete_some", start_again)
    assert not pruning.delete_run(engine, key)
    with reading(engine) as connection:
        assert runs.find_run(connection, "again").key == key


def test_single_runs_by_name(database_url, capsys):
    assert db(["upgrade", "--db", database_url]) == 0
    capsys.readouterr()
    engine = open_engine(database_url)
    for name in ("one", "two", "three"):
        put(engine, name, days_ago=0)
    r = schema.run
    with writing(engine) as connection:
        connection.execute(update(r).where(r.c.id == "two").values(state="running"))
    assert db(["--db", database_url, "delete", "one", "three"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "one (digits) deleted",
        "three (digits) deleted",
    ]
    assert db(["--db", database_url, "delete", "two"]) == 1
    assert "two: it is running; stop its job" in capsys.readouterr().err
    assert db(["--db", database_url, "delete", "two", "one"]) == 4
    assert "one: there is no such run" in capsys.readouterr().err
    engine.dispose()


def test_a_run_that_is_heard_of_meanwhile_stays(engine, monkeypatch):
    key = put(engine, "old", days_ago=100)
    some = pruning._delete_some
    calls = itertools.count()

    def heard_of(connection, table, run):
        if next(calls) == 3:
            r = schema.run
            connection.execute(update(r).where(r.c.key == run).values(last_seen_at=4e9))
        return some(connection, table, run)

    monkeypatch.setattr(pruning, "_delete_some", heard_of)
    assert list(pruning.prune(engine, seconds=90 * DAY)) == []
    with reading(engine) as connection:
        assert runs.find_run(connection, "old").key == key


def test_the_command(database_url, capsys):
    assert db(["upgrade", "--db", database_url]) == 0
    engine = open_engine(database_url)
    put(engine, "old", days_ago=100)
    engine.dispose()
    capsys.readouterr()
    assert db(["prune", "--db", database_url, "--older-than", "90d"]) == 0
    out = capsys.readouterr().out
    assert re.fullmatch(
        r"old \(digits\), last heard of [-0-9]{10} [0-9:]{5} UTC\n1 run deleted\n", out
    )
    for wrong, said in (([], "required: --older-than"), (["--older-than", "soon"], "is no age")):
        with pytest.raises(SystemExit, match="^2$"):
            db(["prune", "--db", database_url, *wrong])
        assert said in capsys.readouterr().err
    if database_url.startswith("sqlite"):
        assert db(["partition", "--db", database_url]) == 2
        assert "only PostgreSQL has partitions" in capsys.readouterr().err


def test_a_project_alone_what_would_go_and_what_still_runs(database_url, capsys):
    assert db(["upgrade", "--db", database_url]) == 0
    engine = open_engine(database_url)
    r = schema.run
    for name, project in (("a", "one"), ("b", "two"), ("c", "one"), ("d", "one")):
        put(engine, name, days_ago=10 if name == "d" else 100, steps=10)
        state = {"state": "running"} if name == "c" else {}
        with writing(engine) as connection:
            values = {"project": project, **state}
            connection.execute(update(r).where(r.c.id == name).values(**values))
    before = counts(engine)
    capsys.readouterr()
    command = ["prune", "--db", database_url, "--older-than", "30d", "--project", "one"]
    assert db([*command, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("a (one), last heard of ")
    assert "\n1 run would be deleted\n" in said
    assert "1 run left that no server has seen end" in said
    assert counts(engine) == before
    assert db(command) == 0
    assert "\n1 run deleted\n" in capsys.readouterr().out
    with reading(engine) as connection:
        left = set(connection.scalars(select(r.c.id)))
    assert left == {"b", "c", "d"}
    with pytest.raises(SystemExit, match="^2$"):
        db(["current", "--db", database_url, "--dry-run"])
    assert "--dry-run" in capsys.readouterr().err
    engine.dispose()


@pytest.fixture
def postgres(engine):
    if engine.dialect.name != "postgresql":
        pytest.skip("PostgreSQL alone has partitions")
    return engine


def partition_of(engine, table, run):
    with reading(engine) as connection:
        t = schema.metadata.tables[table]
        return connection.scalar(
            select(text("tableoid::regclass::text")).select_from(t).where(t.c.run == run).limit(1)
        )


def test_tables_are_cut_by_time_and_dropped(postgres):
    engine = postgres
    first = put(engine, "a", days_ago=100)
    before = counts(engine)
    assert partitions.partition(engine, runs=2) == [t.name for t in partitions.large()]
    assert partitions.partition(engine, runs=2) == []
    assert counts(engine) == before
    keys = [first]
    for n, days in enumerate((100, 100, 100, 10)):
        keys.append(put(engine, f"b{n}", days_ago=days))
    places = [partition_of(engine, "chunk", key) for key in keys]
    assert places[0].startswith("chunk_before_")
    assert len(set(places)) > 2
    assert "chunk_others" not in places
    with reading(engine) as connection:
        found, _ = list_alerts(connection, limit=99)
        assert all(get_alert(connection, alert.id) for alert in found)
        assert {alert.run for alert in found} == {"a", "b0", "b1", "b2", "b3"}
    tables = set(inspect(engine).get_table_names())
    assert set(ids(pruning.prune(engine, seconds=90 * DAY))) == {"a", "b0", "b1", "b2"}
    gone = tables - set(inspect(engine).get_table_names())
    assert places[0] in gone
    assert {run for _, run in counts(engine)} == {keys[-1]}
    # A cut database takes what comes, and partitions are made ahead of it.
    partitions.extend(engine, runs=2)
    later = [put(engine, f"c{n}", days_ago=0, steps=10) for n in range(3)]
    assert all(partition_of(engine, "chunk", key) != "chunk_others" for key in later)


def test_what_nobody_made_a_partition_for_is_not_lost(postgres):
    partitions.partition(postgres, runs=1)
    keys = [put(postgres, f"r{n}", days_ago=0, steps=10) for n in range(7)]
    assert partition_of(postgres, "chunk", keys[-1]) == "chunk_others"
    partitions.extend(postgres, runs=1)
    new = put(postgres, "new", days_ago=0, steps=10)
    assert partition_of(postgres, "chunk", new) != "chunk_others"
