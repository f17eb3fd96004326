"""Verdicts that are kept with runs: one run that cannot be judged stops no other."""

import time
from dataclasses import replace

import pytest
from sqlalchemy import select, update

from rankscope.agent import wire
from rankscope.server.app import create_app
from rankscope.server.evaluation import sort_keys
from rankscope.server.settings import Settings
from rankscope.server.storage import schema
from rankscope.server.storage.reading import hosts
from tests.support.servers.api import batch, column, post


def sent(run, **more):
    steps = column([0, 1], [1.0, 1.0])
    return batch(0, run=run, world_size=1, state="finished", columns={"loss": steps}, **more)


@pytest.fixture
def app(database_url):
    # Its own worker would ask for verdicts while a test looks at them.
    return create_app(Settings(database=database_url, evaluate=False))


@pytest.fixture
def two(app, client):
    for name in ("ant", "bee"):
        assert post(client, sent(name)).status_code == 200
    return app.state.engine


def kept(engine):
    r = schema.run.c
    with engine.connect() as connection:
        rows = connection.execute(select(r.id, r.verdict, r.judge_at))
        return {row.id: (row.verdict, row.judge_at) for row in rows}


def test_a_run_that_cannot_be_judged_is_tried_again_later(two, monkeypatch):
    judged = sort_keys.findings

    def failing(connection, *, runs, now):
        if "ant" in runs.values():
            raise ValueError("broken")
        return judged(connection, runs=runs, now=now)

    monkeypatch.setattr(sort_keys, "findings", failing)
    with two.begin() as connection:
        connection.execute(update(schema.run).values(judge_at=0.0, verdict=""))
    now = time.time()
    sort_keys.keep_due(two, now)
    found = kept(two)
    assert found["ant"] == ("", now + 60)
    assert found["bee"][0]
    assert found["bee"][1] is None


def test_where_ranks_were_before_they_moved(app, client):
    for attempt, host in enumerate(("first", "second")):
        hello = wire.Hello(started_at=1000.0 + 100 * attempt, host=host)
        told = replace(sent("ant", attempt=attempt, hello=hello), session=f"s{attempt}")
        assert post(client, told).status_code == 200
    with app.state.engine.connect() as connection:
        key = connection.scalar(select(schema.run.c.key))
        assert hosts.of_runs(connection, [key]) == {key: {0: "second"}}
        assert hosts.of_runs(connection, [key], until=1050.0) == {key: {0: "first"}}
