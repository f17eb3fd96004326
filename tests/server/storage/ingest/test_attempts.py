"""Processes of a rank: numbered in the order in which they began, whatever the order of arrival."""

import numpy as np
import pytest
from sqlalchemy import select

from rankscope.agent import wire
from rankscope.server.storage import schema
from rankscope.server.storage.database.engine import reading, writing
from rankscope.server.storage.ingest.batches import store_batch
from rankscope.server.storage.ingest.newest_attempts import newest_attempts
from rankscope.server.storage.reading import runs, series


def post(engine, session, seq=0, *, began=None, at=1000.0, boot="", steady=0.0, **fields):
    hello = None
    if began is not None:
        hello = wire.Hello(started_at=began, host="here", boot=boot, steady=steady)
    batch = wire.Batch(run="r", rank=0, session=session, seq=seq, hello=hello, **fields)
    with writing(engine) as connection:
        return store_batch(connection, batch, received_at=at)


def numbers(engine):
    with reading(engine) as connection:
        table = schema.attempt
        rows = connection.execute(select(table.c.session, table.c.attempt)).all()
    return {row.session: row.attempt for row in rows}


def newest(engine):
    with reading(engine) as connection:
        (row,) = newest_attempts(connection, run=runs.find_run(connection, "r").key)
    return row


def test_attempts_count_from_zero(engine):
    for n, session in enumerate("abc"):
        post(engine, session, began=10.0 * n)
    assert numbers(engine) == {"a": 0, "b": 1, "c": 2}


@pytest.mark.parametrize("order", ["abc", "acb", "bac", "bca", "cab", "cba"])
def test_what_an_earlier_process_left_on_disk_stays_earlier(engine, order):
    began = {"a": 10.0, "b": 20.0, "c": 30.0}
    for session in order:
        column = wire.Column(np.array([1]), np.array([began[session]]))
        post(engine, session, began=began[session], columns={"loss": column})
    found = numbers(engine)
    assert sorted(found, key=found.get) == ["a", "b", "c"]
    assert newest(engine).session == "c"
    with reading(engine) as connection:
        key = runs.find_run(connection, "r").key
        (loss,) = series.read_series(connection, run=key, metric="loss")
    assert loss.values.tolist() == [30.0]


def loss_of(engine):
    with reading(engine) as connection:
        key = runs.find_run(connection, "r").key
        (loss,) = series.read_series(connection, run=key, metric="loss")
    return loss.values.tolist()


@pytest.mark.parametrize("boots", ["same", "another"])
def test_a_clock_that_was_set_back_does_not_bring_the_dead_back(engine, boots):
    """Each process begins half an hour after the one before, and the clock shows an hour less."""
    for n, session in enumerate("abc"):
        at = 100_000.0 + 1800 * n
        clock = at - 3600 * n
        boot, steady = ("one", 500 + 1800 * n) if boots == "same" else (f"boot {n}", 30.0)
        post(
            engine,
            session,
            began=clock,
            at=at,
            boot=boot,
            steady=steady,
            sent_at=clock + 1,
            columns={"loss": wire.Column(np.array([1]), np.array([float(n)]))},
        )
    assert numbers(engine) == {"a": 0, "b": 1, "c": 2}
    assert newest(engine).session == "c"
    assert loss_of(engine) == [2.0]


@pytest.mark.parametrize("order", ["abc", "cab", "cba"])
def test_what_was_left_on_disk_stays_earlier_by_the_clock_that_nobody_sets(engine, order):
    began = {"a": 10.0, "b": 20.0, "c": 30.0}
    for session in order:
        column = wire.Column(np.array([1]), np.array([began[session]]))
        # The later ones have a clock that was set back.
        clock, steady = 1000.0 - began[session], began[session]
        post(engine, session, began=clock, boot="x", steady=steady, columns={"loss": column})
    found = numbers(engine)
    assert sorted(found, key=found.get) == ["a", "b", "c"]
    assert loss_of(engine) == [30.0]


def test_batches_that_overtake_each_other_do_not_turn_the_state_back(engine):
    post(engine, "a", 0, began=1.0)
    post(engine, "a", 2, state="finished", phase="idle")
    post(engine, "a", 1, state="running", phase="forward")
    assert (newest(engine).state, newest(engine).phase) == ("finished", "idle")
    with reading(engine) as connection:
        assert runs.find_run(connection, "r").state == "finished"


def test_an_outage_of_the_server_is_no_gap_of_the_rank(engine):
    post(engine, "a", 0, began=1.0, at=1000.0, sent_at=1000.0)
    post(engine, "a", 1, at=1600.0, sent_at=1002.0)
    assert newest(engine).longest_gap == pytest.approx(2.0)
