"""Baselines of a project: kept up by the server, marked and taken away by hand."""

import pytest
from sqlalchemy import select, update

from rankscope.agent import wire
from rankscope.client import Client
from rankscope.server.commands.baseline import baseline
from rankscope.server.commands.lists import runs
from rankscope.server.storage import schema
from rankscope.server.storage.database.engine import reading, writing
from rankscope.server.storage.ingest.batches import store_batch
from rankscope.server.storage.judgement import baselines
from rankscope.server.storage.maintenance.pruning import old_runs
from rankscope.server.storage.maintenance.retention import Retention, Sizes, surplus
from tests.support.servers.api import batch, column
from tests.support.servers.service import Service, eventually

STEPS = 120


def sent(run, *, project="vision", bad=False, state="finished"):
    loss = [2.0 / (1 + 0.02 * k) for k in range(STEPS)]
    if bad:
        loss[60:] = [float("nan")] * (STEPS - 60)
    points = column(list(range(STEPS)), loss)
    return batch(0, run=run, project=project, world_size=1, state=state, columns={"loss": points})


@pytest.fixture
def service(tmp_path):
    with Service(tmp_path / "server") as running:
        yield running


def known(service, **query):
    return {r["id"]: r["baseline"] for r in service.get("/runs", **query)["items"]}


@pytest.mark.e2e
def test_what_passed_is_a_baseline_until_somebody_says_otherwise(service, capsys):
    with Client(service.url) as client:
        client.ingest(wire.encode(sent("good")))
        client.ingest(wire.encode(sent("bad", bad=True)))
        client.ingest(wire.encode(sent("other", project="audio")))
        client.ingest(wire.encode(sent("running", state="running")))
        eventually(lambda: known(service)["good"] == "passed", timeout_s=60)
        eventually(lambda: known(service)["other"] == "passed", timeout_s=60)
        assert known(service) == {
            "good": "passed",
            "bad": None,
            "other": "passed",
            "running": None,
        }
        assert known(service, project="vision", baseline="true") == {"good": "passed"}
        assert known(service, baseline="false") == {"bad": None, "running": None}
        # By hand: one that failed is one, one that passed is none.
        assert baseline(["bad", "--server", service.url]) == 0
        client.baseline("good", marked=False)
        assert known(service) == {
            "good": "unmarked",
            "bad": "marked",
            "other": "passed",
            "running": None,
        }
        assert [run.id for run in client.runs(project="vision", baseline=True)] == ["bad"]
        capsys.readouterr()
        assert runs(["--baseline", "--project", "vision", "--server", service.url]) == 0
        assert "bad" in capsys.readouterr().out
        acts = [(entry.act, entry.subject) for entry in client.audit()]
        assert acts == [("baseline.unmark", "good"), ("baseline.mark", "bad")]
        assert baseline(["nobody", "--server", service.url]) == 4


@pytest.fixture
def three(engine):
    """Three runs of one project, which no server judges meanwhile."""
    r = schema.run
    for n, name in enumerate(("ant", "bee", "cat")):
        with writing(engine) as connection:
            store_batch(connection, sent(name), received_at=1000.0)
            values = {"started_at": 1000.0 + n, "evaluated": r.c.arrivals, "state": "finished"}
            connection.execute(update(r).where(r.c.id == name).values(**values))
    return engine


def learnt(engine, **verdicts):
    """What is kept once the runs have been judged so, one after the other."""
    r = schema.run
    for name, verdict in verdicts.items():
        with writing(engine) as connection:
            row = connection.execute(select(r).where(r.c.id == name)).one()
            if baselines.learn(connection, row, verdict=verdict):
                baselines.trim(connection, project=row.project)
    with reading(engine) as connection:
        return dict(connection.execute(select(r.c.id, r.c.baseline)).all())


def test_the_newest_that_passed_are_kept(three, monkeypatch):
    monkeypatch.setattr(baselines, "MOST_PASSED", 2)
    assert learnt(three, cat="pass", ant="pass", bee="pass") == {
        "ant": None,
        "bee": "passed",
        "cat": "passed",
    }
    # What passes no more is none, and what is older does not come back before it is judged again.
    assert learnt(three, cat="fail") == {"ant": None, "bee": "passed", "cat": None}
    assert learnt(three, ant="pass") == {"ant": "passed", "bee": "passed", "cat": None}


def test_what_a_person_says_stays(three):
    with writing(three) as connection:
        keys = dict(connection.execute(select(schema.run.c.id, schema.run.c.key)).all())
        baselines.say(connection, run=keys["ant"], baseline="marked")
        baselines.say(connection, run=keys["bee"], baseline="unmarked")
    assert learnt(three, ant="fail", bee="pass", cat="pending") == {
        "ant": "marked",
        "bee": "unmarked",
        "cat": None,
    }


def test_retention_leaves_marked_runs(three):
    with writing(three) as connection:
        connection.execute(update(schema.run).values(last_seen_at=1000.0, baseline="passed"))
        marked = update(schema.run).where(schema.run.c.id == "ant").values(baseline="marked")
        connection.execute(marked)
    assert {run.id for run in old_runs(three, seconds=60.0)} == {"bee", "cat"}
    for kept in (Retention(seconds={None: 60.0}), Retention(bytes={None: 0})):
        assert {run.id for run in surplus(three, kept, Sizes())} == {"bee", "cat"}
