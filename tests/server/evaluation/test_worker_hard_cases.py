"""The worker over a real database where things went wrong in the job, not only in the model."""

import threading

import numpy as np
import pytest

from rankscope.agent import wire
from rankscope.server.evaluation.worker import Worker
from rankscope.server.storage.database import migrate
from rankscope.server.storage.database.engine import open_engine, reading, writing
from rankscope.server.storage.ingest.batches import store_batch
from rankscope.server.storage.judgement import evaluation
from rankscope.server.storage.judgement.alerts import list_alerts
from rankscope.server.storage.judgement.comparisons import list_comparisons
from rankscope.server.storage.reading import runs

TABLE = wire.TensorTable(("w",), ((8, 8),), ("float32",), ("",))


_HELLO = wire.Hello(started_at=0.0, tables={"parameters": TABLE})


class Job:
    """Ranks that post, and a worker on a clock of its own."""

    def __init__(self, engine, world_size):
        self.engine = engine
        self.world_size = world_size
        self.time = 1000.0
        self.sent = {}
        self.worker = Worker(engine, threading.Event(), now=lambda: self.time, strict=True)

    def post(
        self,
        rank,
        steps,
        digest=lambda step: 7,
        *,
        session="a",
        state="running",
        through=None,
        hello=None,
        prints=(),
        **series,
    ):
        steps = np.array(list(steps), dtype=np.int64)
        seq = self.sent[rank, session] = self.sent.get((rank, session), -1) + 1
        digests = np.array([digest(int(step)) for step in steps], dtype=np.uint64)
        if through is None:
            through = int(steps[-1])
        batch = wire.Batch(
            run="r",
            rank=rank,
            seq=seq,
            session=session,
            world_size=self.world_size,
            through_step=through,
            state=state,
            hello=hello or (_HELLO if seq == 0 else None),
            prints=prints,
            columns={
                name: wire.Column(steps, np.full(len(steps), value))
                for name, value in {"lr": 0.1, **series}.items()
            },
            words={"parameters": wire.Column(steps, digests)},
        )
        with writing(self.engine) as connection:
            return store_batch(connection, batch, received_at=self.time)

    def evaluate(self, seconds=0.5):
        self.time += seconds
        self.worker.sweep()

    def alerts(self, kind):
        with self.engine.connect() as connection, connection.begin():
            run = runs.find_run(connection, "r").key
            found = list_alerts(connection, limit=99, run=run, kind=kind, consequences=True)[0]
        return [(a.state, a.ranks, a.first_step, a.last_step) for a in found]


@pytest.fixture
def engine(tmp_path):
    engine = open_engine(f"sqlite:///{tmp_path / 'r.db'}")
    migrate.upgrade(engine)
    yield engine
    engine.dispose()


def desynced(rank, since):
    return lambda step: 9 if rank == 2 and step >= since else 7


def test_a_restart_from_a_checkpoint_is_no_desync(engine):
    """What a dead attempt had said of steps that are taken again is not held against the others."""
    job = Job(engine, 3)
    for first in range(0, 150, 10):
        for rank in range(3):
            job.post(rank, range(first, first + 10))
        job.evaluate()
    job.post(0, range(150, 156))
    job.evaluate()
    for rank in range(3):
        job.post(rank, [], session="b", through=99)
    for first in range(100, 220, 10):
        for rank in range(3):
            # Rank 0 thins its sampling: it says nothing new of the odd steps.
            stride = 2 if rank == 0 else 1
            steps = range(first, first + 10, stride)
            job.post(rank, steps, lambda step: 8, session="b", through=first + 9)
        job.evaluate()
    assert job.alerts("desync.parameters") == []


def test_a_suspect_rank_that_is_missing_resolves_nothing(engine):
    job = Job(engine, 4)
    for first in range(0, 400, 10):
        for rank in range(4):
            if rank != 2 or first < 250:
                job.post(rank, range(first, first + 10), desynced(rank, 150))
        job.evaluate(2.0)
    assert job.alerts("desync.parameters") == [("open", (2,), 150, 249)]


def test_dense_sampling_is_asked_for_ahead_of_a_fast_trainer(engine):
    job = Job(engine, 4)
    requests = []
    for first in range(0, 1500, 300):
        for rank in range(4):
            answer = job.post(rank, range(first, first + 300), desynced(rank, 450))
            if answer.dense_until is not None:
                requests.append((first, answer.dense_until))
        job.evaluate()
    # Found with the batch that ends at step 599; the next one ends at 899, and its answer asks the
    # ranks.
    assert {first for first, _ in requests} == {600}
    assert min(until for _, until in requests) >= 920


@pytest.mark.parametrize("steps", [25, 50, 100])
def test_dense_sampling_reaches_ranks_that_post_once_a_second(engine, steps):
    job = Job(engine, 4)
    requests = []
    # Evaluated after each round of posts, so that no rank is ahead of what was found.
    for first in range(0, 12 * steps, steps):
        for rank in range(4):
            # They differ from the last step of a batch on.
            answer = job.post(rank, range(first, first + steps), desynced(rank, 7 * steps - 1))
            if answer.dense_until is not None:
                requests.append((first, answer.dense_until))
        job.evaluate(1.0)
    # The next batch ends before step 8 * steps.
    assert min(first for first, _ in requests) == 7 * steps
    assert min(until for _, until in requests) >= 8 * steps + 10


def test_gradients_that_stand_out_are_sampled_densely(engine):
    job = Job(engine, 4)
    requests = []
    for first in range(0, 60, 10):
        for rank in range(4):
            # Norms that differ a little from batch to batch, and one rank's by a lot.
            norm = (1.0 + 0.01 * (first % 3)) * (4.0 if rank == 2 else 1.0)
            answer = job.post(rank, range(first, first + 10), grad_norm_local=norm)
            if answer.dense_until is not None:
                requests.append((first, answer.dense_until))
        job.evaluate()
    assert [found[1] for found in job.alerts("rank.gradient_outlier")] == [(2,)]
    # Found with the first ten steps; the answer to each rank's next post asks for it, once.
    assert min(first for first, _ in requests) == 10
    assert len({until for _, until in requests}) == 1


def test_a_client_that_never_says_which_steps_are_complete(engine):
    job = Job(engine, 3)
    for first in range(0, 100, 10):
        for rank in range(3):
            job.post(rank, range(first, first + 10), desynced(rank, 50), through=-1)
        job.evaluate()
    for rank in range(3):
        job.post(rank, [], state="finished", through=-1)
    job.evaluate()
    assert job.alerts("desync.parameters") == [("open", (2,), 50, 99)]


def test_what_an_earlier_process_left_on_disk_is_sorted_in_before_the_later_one(engine):
    """The later process is attempt 0 until the digests of the earlier one arrive."""
    job = Job(engine, 3)

    def post(rank, steps, digest, session, began):
        hello = wire.Hello(started_at=began, host="here", tables={"parameters": TABLE})
        job.post(rank, steps, lambda step: digest, session=session, hello=hello)

    for rank in range(3):
        post(rank, range(50, 60), 8, "late", 200.0)
    job.evaluate()
    for rank in range(3):
        post(rank, range(60), 7, "early", 100.0)
        job.evaluate()
    assert job.alerts("desync.parameters") == []
    with reading(engine) as connection:
        key = runs.find_run(connection, "r").key
        found, _ = list_comparisons(connection, run=key, limit=99, stage="parameters")
    assert [s.comparison.equal for s in found] == [True]


def test_a_hello_that_comes_again_adds_tables(engine):
    job = Job(engine, 3)
    for rank in range(3):
        job.post(rank, range(10))
    job.evaluate()
    state = wire.TensorTable(("w",), ((8, 8),), ("float32",), ("",))
    for rank in range(3):
        again = wire.Hello(started_at=0.0, tables={"optimizer/momentum": state})
        digests = np.array([1 + (rank == 2)], np.uint64)
        made = wire.Fingerprint(
            step=10, stage="optimizer_state", table="optimizer/momentum", digests=digests
        )
        job.post(rank, range(10, 12), hello=again, prints=(made,))
    job.evaluate()
    assert job.alerts("desync.optimizer") == [("open", (2,), 10, 10)]
    with reading(engine) as connection:
        key = runs.find_run(connection, "r").key
        [alert] = list_alerts(connection, limit=9, run=key, kind="desync.optimizer")[0]
        tables = evaluation.load_new(connection, run=key, after=0).tables
    assert alert.tensors == ("w",)
    assert {rank: set(of) for rank, of in tables.items()} == dict.fromkeys(
        range(3), {"parameters", "optimizer/momentum"}
    )
