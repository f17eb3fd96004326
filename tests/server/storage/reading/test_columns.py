"""Ranks in step come back in one array, and whatever differs about one rank separately."""

import numpy as np
import pytest

from rankscope.agent import wire
from rankscope.server.storage.database import migrate
from rankscope.server.storage.database.engine import open_engine, reading, writing
from rankscope.server.storage.ingest.batches import store_batch
from rankscope.server.storage.judgement import evaluation
from rankscope.server.storage.judgement.liveness import LivenessReader
from rankscope.server.storage.reading import runs


@pytest.fixture
def engine(tmp_path):
    engine = open_engine(f"sqlite:///{tmp_path / 'r.db'}")
    migrate.upgrade(engine)
    yield engine
    engine.dispose()


def store(engine, rank, seq, steps, values, at=1.0):
    batch = wire.Batch(
        run="r",
        rank=rank,
        session=f"s{rank}",
        seq=seq,
        world_size=3,
        through_step=steps[-1],
        columns={
            name: wire.Column(np.array(steps), np.array(values) + shift)
            for shift, name in enumerate(("loss", "lr"))
        },
    )
    with writing(engine) as connection:
        store_batch(connection, batch, received_at=at)


def read(engine, after=0, reader=None):
    with reading(engine) as connection:
        key = runs.find_run(connection, "r").key
        return evaluation.load_new(connection, run=key, after=after, known=reader)


def test_ranks_in_step_share_an_array(engine):
    store(engine, 0, 0, [4, 5], [1.0, 2.0])
    store(engine, 1, 0, [4, 5], [3.0, 4.0])
    store(engine, 2, 0, [4, 6], [5.0, 6.0])
    together, alone = read(engine).columns
    assert together.ranks.tolist() == [0, 1]
    assert together.arrivals.tolist() == [1, 2]
    assert together.names == ("loss", "lr")
    assert together.values.tolist() == [[[1, 2], [2, 3]], [[3, 4], [4, 5]]]
    assert (alone.ranks.tolist(), alone.steps.tolist()) == ([2], [4, 6])


def test_a_step_posted_again_by_a_rank_is_in_another_one(engine):
    store(engine, 0, 0, [4], [1.0])
    store(engine, 0, 1, [4], [2.0])
    assert [(part.ranks.tolist(), part.arrivals.tolist()) for part in read(engine).columns] == [
        ([0], [1]),
        ([0], [2]),
    ]


def test_ranks_that_have_said_nothing_new_stay_the_same_objects(engine):
    reader = LivenessReader()
    store(engine, 0, 0, [4], [1.0])
    store(engine, 1, 0, [4], [1.0])
    before = read(engine, reader=reader).liveness
    store(engine, 1, 1, [5], [1.0], at=7.0)
    after = read(engine, after=2, reader=reader).liveness
    assert after[0] is before[0]
    assert (after[1].through_step, after[1].liveness.last_seen, after[1].attempt) == (5, 7.0, 0)
