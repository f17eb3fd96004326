"""`GET /compare`, asked as its route does: what it takes of the server."""

import time
from collections import Counter
from threading import get_ident

import numpy as np
import pytest
from sqlalchemy import event

from rankscope.server.api.compare import compare
from rankscope.server.api.problems import Problem
from rankscope.server.storage.database import migrate
from rankscope.server.storage.database.engine import open_engine, writing
from rankscope.server.storage.ingest.batches import store_batch
from tests.support.servers.api import batch, column

# Some count tokens or samples as steps.
STEPS = [0, 10**6, 3 * 10**12, 3 * 10**12 + 7]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    made = open_engine(f"sqlite:///{tmp_path_factory.mktemp('runs') / 'runs.db'}")
    migrate.upgrade(made)
    for run, last in (("otter", 5), ("heron", 6)):
        words = {"parameters": column(STEPS, [1, 2, 3, last], np.uint64)}
        sent = batch(run=run, columns={"loss": column(STEPS, [2.0, 1, 1, 1])}, words=words)
        with writing(made) as connection:
            store_batch(connection, sent, received_at=time.time())
    yield made
    made.dispose()


def test_it_holds_one_connection_at_a_time(engine):
    held, most = Counter(), Counter()

    def out(*_):
        held[get_ident()] += 1
        most[get_ident()] = max(most[get_ident()], held[get_ident()])

    def back(*_):
        held[get_ident()] -= 1

    event.listen(engine, "checkout", out)
    event.listen(engine, "checkin", back)
    try:
        answer = compare(engine, ["otter", "heron"])
    finally:
        event.remove(engine, "checkout", out)
        event.remove(engine, "checkin", back)
    assert [run.id for run in answer.runs] == ["otter", "heron"]
    assert most == {get_ident(): 1}


@pytest.mark.timeout(120)  # step by step it would take years
def test_steps_far_apart_are_no_reason_to_wait(engine):
    bits = compare(engine, ["otter", "heron"]).bits
    assert (bits.state, bits.steps) == ("differ", 4)
    assert (bits.first.step, bits.first.after) == (STEPS[3], STEPS[2])


@pytest.mark.parametrize("runs", [[], ["otter"], ["otter"] * 3, ["otter", "nobody"]])
def test_what_cannot_be_compared_is_a_problem(engine, runs):
    with pytest.raises(Problem) as refused:
        compare(engine, runs)
    assert refused.value.status == (404 if "nobody" in runs else 422)
