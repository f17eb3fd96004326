"""One run's data, however many, and any number of runs do not keep another one waiting."""

import threading

import numpy as np
import pytest

from rankscope.agent import wire
from rankscope.server.evaluation.run import _Part
from rankscope.server.evaluation.worker import Worker
from rankscope.server.storage.database.engine import reading, writing
from rankscope.server.storage.ingest.batches import store_batch
from rankscope.server.storage.reading import runs


class Service:
    """Runs that post, and a worker on a clock of its own."""

    def __init__(self, engine):
        self.engine = engine
        self.time = 1000.0
        self.worker = Worker(engine, threading.Event(), now=lambda: self.time, strict=True)
        self.sent = {}

    def post(self, run, batches=1, steps=1):
        for _ in range(batches):
            seq = self.sent.setdefault(run, 0)
            self.sent[run] += 1
            each = np.arange(seq * steps, (seq + 1) * steps)
            batch = wire.Batch(
                run=run,
                rank=0,
                seq=seq,
                session="a",
                world_size=1,
                through_step=int(each[-1]),
                hello=wire.Hello(started_at=0.0) if seq == 0 else None,
                columns={"loss": wire.Column(each, np.ones(steps))},
            )
            with writing(self.engine) as connection:
                store_batch(connection, batch, received_at=self.time)

    def sweep(self, slice_s):
        self.time += 1.0
        return self.worker.sweep(slice_s)

    def left(self, run):
        """Batches that nobody has looked at."""
        with reading(self.engine) as connection:
            row = runs.find_run(connection, run)
        return row.arrivals - row.evaluated


@pytest.fixture
def service(engine):
    return Service(engine)


def test_a_run_that_is_followed_does_not_wait_for_new_ones(service):
    service.post("honest")
    service.sweep(1e9)
    new = [f"new-{n}" for n in range(12)]
    for name in new:
        service.post(name)
    service.post("honest")
    # As if there were time for next to nothing.
    assert service.sweep(0.0)
    assert service.left("honest") == 0
    assert sum(service.left(name) > 0 for name in new) >= 10
    for _ in range(len(new)):
        service.post("honest")
        service.sweep(0.0)
        assert service.left("honest") == 0
    assert all(service.left(name) == 0 for name in new)


def test_a_new_job_does_not_wait_for_many_new_runs_of_one_point(service):
    new = [f"new-{n}" for n in range(12)]
    for name in new:
        service.post(name)
    service.post("job", batches=8)
    assert service.sweep(0.0)
    assert service.left("job") == 0
    assert sum(service.left(name) > 0 for name in new) >= 10


def test_a_run_with_much_to_catch_up_with_is_evaluated_a_part_at_a_time(service):
    for name in ("honest", "greedy"):
        service.post(name)
    service.sweep(1e9)
    service.post("greedy", batches=300)
    service.post("honest")
    assert service.sweep(0.0)
    assert service.left("honest") == 0
    first = service.left("greedy")
    assert 0 < first < 300
    assert service.sweep(0.0)
    assert service.left("greedy") < first
    assert not service.sweep(1e9)
    assert service.left("greedy") == 0


def test_silent_runs_are_looked_at_by_and_by(service):
    """Those that were looked at last come last."""
    names = [f"quiet-{n}" for n in range(6)]
    for name in names:
        service.post(name)
    for _ in names:
        service.sweep(0.0)
    seen = service.worker._seen_at
    before = dict(seen)
    for _ in range(len(names)):
        assert not service.sweep(0.0)
    assert all(seen[key] > before[key] for key in before)


def test_the_part_follows_what_the_last_one_took():
    part = _Part()
    first = part.batches
    part.took(0.01, more=True)
    assert part.batches == 2 * first
    part.took(2.5, more=True)
    assert part.batches == pytest.approx(0.2 * first, abs=1)
    for _ in range(9):
        part.took(2.5, more=True)
    assert part.batches == 1
    # The last part of a run is short because there was no more.
    part.took(0.01, more=False)
    assert part.batches == 1
    for _ in range(20):
        part.took(0.01, more=True)
    assert part.batches == 2000
