"""A rank whose tripwire has tripped has the others sample everything, too, and not too often."""

import numpy as np

from rankscope.agent import wire
from rankscope.server.storage.database.engine import writing
from rankscope.server.storage.ingest.batches import store_batch
from rankscope.server.storage.ingest.run_names import run_key
from rankscope.server.storage.judgement.evaluation import ask_dense

TRIP = wire.Event(step=130, kind="tripwire", text="loss is 50 at step 130")


def posted(engine, rank, seq, steps, *events):
    """What a rank is asked for in the answer to a batch of some steps."""
    at = np.arange(steps.start, steps.stop)
    batch = wire.Batch(
        run="r",
        rank=rank,
        seq=seq,
        session="s",
        world_size=3,
        columns={"loss": wire.Column(at, np.ones(len(at)))} if len(at) else {},
        through_step=steps.stop - 1,
        events=events,
    )
    with writing(engine) as connection:
        return store_batch(connection, batch, received_at=1000.0).dense_until


def test_the_next_answer_to_each_rank_asks_for_everything(engine):
    assert posted(engine, 0, 0, range(100)) is None
    assert posted(engine, 1, 0, range(100)) is None
    # Twice as far ahead as there are steps in a batch, 20 steps further.
    until = 149 + 20 + 2 * 49
    assert posted(engine, 1, 1, range(100, 150), TRIP) == until
    assert posted(engine, 0, 1, range(100, 160)) == until
    assert posted(engine, 2, 0, range(140)) == until
    # It has come to that step.
    assert posted(engine, 2, 1, range(140, 400)) is None


def test_no_more_often_than_every_4096_steps(engine):
    until = posted(engine, 0, 0, range(10), TRIP)
    assert posted(engine, 1, 0, range(11), TRIP) == until
    assert posted(engine, 0, 1, range(1000, 1010), TRIP) is None
    assert posted(engine, 0, 2, range(5000, 5010), TRIP) == 5009 + 20 + 18
    assert posted(engine, 1, 1, range(5000, 5010)) == 5009 + 20 + 18


def test_a_wish_that_goes_further_stays(engine):
    posted(engine, 0, 0, range(10))
    with writing(engine) as connection:
        ask_dense(connection, run=run_key(connection, "r"), until_step=9000)
    assert posted(engine, 0, 1, range(10, 20), TRIP) == 9000


def test_a_batch_without_points(engine):
    assert posted(engine, 0, 0, range(0), TRIP) == 19
