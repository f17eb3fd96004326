"""Runs that are no longer to be kept go by themselves, and hold up nobody."""

import threading
import time

import numpy as np
import pytest
from sqlalchemy import update

from rankscope.agent import wire
from rankscope.server import cli
from rankscope.server.health import Health
from rankscope.server.processes.pruner import Pruner
from rankscope.server.storage import schema
from rankscope.server.storage.database.engine import reading, writing
from rankscope.server.storage.ingest.batches import store_batch
from rankscope.server.storage.maintenance import pruning
from rankscope.server.storage.maintenance.retention import Retention
from rankscope.server.storage.reading import runs
from tests.support.servers.service import eventually

DAY = 86400.0


def put(engine, name, project, *, days_ago, state="finished", batches=1, points=1000):
    for seq in range(batches):
        steps = np.arange(seq * points, (seq + 1) * points)
        column = wire.Column(steps, np.random.default_rng(seq).random(points))
        batch = wire.Batch(
            run=name, project=project, rank=0, seq=seq, session="s", columns={"loss": column}
        )
        with writing(engine) as connection:
            store_batch(connection, batch, received_at=time.time())
    r = schema.run
    with writing(engine) as connection:
        at = time.time() - days_ago * DAY
        connection.execute(update(r).where(r.c.id == name).values(last_seen_at=at, state=state))


def left(engine, names):
    with reading(engine) as connection:
        return {name for name in names if runs.find_run(connection, name) is not None}


def assert_pruned(engine, retention, names, expected):
    health = Health()
    pruner = Pruner(engine, retention, health=health, period=0.01, share=1.0)
    pruner.start()
    try:
        eventually(lambda: left(engine, names) == expected, timeout_s=60)
        time.sleep(0.1)
    finally:
        pruner.stop()
    assert left(engine, names) == expected
    assert health.report()["counts"]["pruned_runs"] == len(names) - len(expected)


def test_by_age_for_each_project(engine):
    ages = {"v-old": 40, "v-new": 20, "t-old": 40, "t-new": 5}
    for name, days in ages.items():
        put(engine, name, {"v": "vision", "t": "text"}[name[0]], days_ago=days)
    put(engine, "v-running", "vision", days_ago=99, state="running")
    rules = Retention(seconds={"text": 10 * DAY, None: 30 * DAY})
    assert_pruned(engine, rules, [*ages, "v-running"], {"v-new", "t-new", "v-running"})


def test_by_size_the_oldest_of_a_project_first(engine):
    # 8 kB each, and a little more.
    for days in range(6):
        put(engine, f"v{days}", "vision", days_ago=days)
        put(engine, f"t{days}", "text", days_ago=days)
    put(engine, "v-running", "vision", days_ago=99, state="running")
    names = [f"{p}{days}" for p in "vt" for days in range(6)] + ["v-running"]
    kept = {"v0", "v1", "v2", "v-running"} | {f"t{days}" for days in range(6)}
    assert_pruned(engine, Retention(bytes={"vision": 30_000}), names, kept)


def test_others_write_while_a_large_run_is_deleted(sqlite, monkeypatch):
    monkeypatch.setattr(pruning, "_ROWS", 5)
    put(sqlite, "old", "p", days_ago=40, batches=200, points=10)
    pruner = Pruner(sqlite, Retention(seconds={None: 30 * DAY}), period=0.01, share=0.1)
    took, gone = [], threading.Event()
    pruner.start()
    try:
        for n in range(10_000):
            began = time.monotonic()
            with writing(sqlite):
                took.append(time.monotonic() - began)
            if n % 10 == 0 and not left(sqlite, ["old"]):
                gone.set()
                break
            time.sleep(0.002)
    finally:
        pruner.stop()
    assert gone.is_set()
    # In between its forty transactions, and hardly ever behind one.
    assert len(took) > 40
    assert np.median(took) < 0.05


def test_nothing_is_deleted_without_rules(sqlite):
    put(sqlite, "old", "p", days_ago=4000)
    pruner = Pruner(sqlite, Retention(), period=0.01)
    pruner.start()
    time.sleep(0.2)
    pruner.stop()
    assert left(sqlite, ["old"]) == {"old"}


@pytest.mark.parametrize(
    "wrong",
    [("--keep", "90"), ("--keep", "vision=0d"), ("--keep-size", "9"), ("--keep-size", "x=")],
)
def test_a_rule_that_is_none_is_refused(capsys, wrong):
    with pytest.raises(SystemExit) as ended:
        cli.serve([*wrong])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "write for example" in said or "no time" in said
