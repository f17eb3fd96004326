"""A machine's clock that is set while the server runs, and who is alive meanwhile."""

import threading

import numpy as np
import pytest

from rankscope.agent import wire
from rankscope.server.clock import SteadyClock
from rankscope.server.evaluation.worker import Worker
from rankscope.server.storage.database.engine import reading, writing
from rankscope.server.storage.ingest.batches import store_batch
from rankscope.server.storage.reading import runs

DAY = 86400.0


class Machine:
    """Its clock, which may be set, and what really passes."""

    def __init__(self):
        self.passed = 0.0
        self.set_by = 0.0
        self.clock = SteadyClock(lambda: 1e9 + self.passed + self.set_by, lambda: self.passed)

    def after(self, seconds):
        self.passed += seconds
        return self.clock() - 1e9


@pytest.mark.parametrize("jump", [DAY, -DAY, 3600.0, -10.0])
def test_a_jump_that_does_not_last_is_not_seen(jump):
    machine = Machine()
    assert machine.after(5) == 5
    machine.set_by = jump
    for second in range(6, 200):
        assert machine.after(1) == second
    machine.set_by = 0.0
    assert machine.after(1) == 200


def test_small_corrections_are_followed_at_once():
    machine = Machine()
    for _ in range(100):
        machine.set_by += 0.5
        assert machine.after(60) == machine.passed + machine.set_by


def test_a_jump_that_lasts_is_believed():
    machine = Machine()
    machine.set_by = DAY
    assert machine.after(1) == 1
    assert machine.after(299) == 300
    assert machine.after(2) == DAY + 302
    # Each setting has to last by itself.
    machine.set_by = 2 * DAY
    assert machine.after(200) == DAY + 502
    machine.set_by = 3 * DAY
    assert machine.after(200) == DAY + 702
    assert machine.after(400) == 3 * DAY + 1102


@pytest.mark.parametrize("jump", [0.0, DAY, -DAY])
def test_a_job_that_died_is_found_dead_although_the_clock_jumped(engine, jump):
    """By the machine's own clock it was running for a day, or was lost while it posted."""
    machine = Machine()
    worker = Worker(engine, threading.Event(), now=machine.clock, strict=True)
    for second in range(60):
        # For ten seconds the clock is wrong; the ranks die within these.
        machine.set_by = jump if 20 <= second < 30 else 0.0
        machine.after(1)
        for rank in range(2) if second < 25 else ():
            steps = np.array([second], dtype=np.int64)
            hello = wire.Hello(started_at=1e9) if second == 0 else None
            batch = wire.Batch(
                run="r",
                rank=rank,
                seq=second,
                session="a",
                world_size=2,
                through_step=second,
                hello=hello,
                columns={"loss": wire.Column(steps, np.array([1.0]))},
            )
            with writing(engine) as connection:
                store_batch(connection, batch, received_at=machine.clock())
        worker.sweep()
        if second == 40:
            with reading(engine) as connection:
                assert runs.find_run(connection, "r").state == "running"
    for _ in range(600):
        machine.after(1)
        worker.sweep()
        with reading(engine) as connection:
            state = runs.find_run(connection, "r").state
        if state == "lost":
            break
    assert state == "lost"
    assert machine.passed < 400
    worker.stop()
