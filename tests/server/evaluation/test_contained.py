"""A run that cannot be evaluated or compacted fails alone.

And what was stored before there were limits hangs nothing, also after a restart.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
from sqlalchemy import select, update

from rankscope.agent import wire
from rankscope.server.detectors import registry
from rankscope.server.evaluation import run as run_evaluation
from rankscope.server.evaluation.worker import Worker
from rankscope.server.health import Health
from rankscope.server.processes import compactor
from rankscope.server.storage import schema
from rankscope.server.storage.database.engine import reading, writing
from rankscope.server.storage.ingest.batches import store_batches
from rankscope.server.storage.ingest.dictionary import Dictionaries
from rankscope.server.storage.maintenance import watermarks
from rankscope.server.storage.maintenance.compaction import compact, runs_to_compact
from rankscope.server.storage.reading import runs

ENDLESS = {"first": 0, "step": 1, "count": 10**15}


def store(engine, run, steps=(0, 1, 2), *, rank=0, seq=0, world_size=1, config=None):
    """Past the wire, as from before it had limits."""
    steps = np.array(steps, np.int64)
    batch = wire.Batch(
        run=run,
        rank=rank,
        seq=seq,
        session=f"s{rank}",
        world_size=world_size,
        through_step=int(steps[-1]),
        state="finished",
        hello=wire.Hello(started_at=0.0, config=config or {"model": "GPT"}),
        columns={"loss": wire.Column(steps, np.linspace(2, 1, len(steps)))},
    )
    with writing(engine) as connection:
        store_batches(connection, [(batch, 1000.0)], Dictionaries())


def evaluated(engine):
    """Runs whose new data have all been evaluated."""
    r = schema.run.c
    with reading(engine) as connection:
        return {*connection.scalars(select(r.id).where(r.arrivals == r.evaluated))}


def key_of(engine, run):
    with reading(engine) as connection:
        return runs.find_run(connection, run).key


class Served:
    """A worker in its threads, until all it can evaluate is evaluated."""

    def __init__(self, engine, **options):
        self.health = Health()
        self.wake = threading.Event()
        self.reported = threading.Condition()
        self.worker = Worker(engine, self.wake, health=self.health, notify=self._notify, **options)
        self.health.changed = self._notify
        self.engine = engine

    def _notify(self, run=""):
        with self.reported:
            self.reported.notify_all()

    def until(self, what, seconds=60):
        with self.reported:
            # Not every step of it is reported.
            for _ in range(10 * seconds):
                if what():
                    return
                self.reported.wait(0.1)
        raise AssertionError("it did not come to that")

    def __enter__(self):
        self.worker.start()
        self.wake.set()
        return self

    def __exit__(self, *error):
        self.worker.stop()


def test_ranks_that_nobody_could_count_hold_nobody_up(engine):
    # As it was stored by an earlier version, so also after a restart.
    for rank in (0, 1):
        store(engine, "hostile", rank=rank, world_size=2, config={"sharded_over": ENDLESS})
    store(engine, "honest")
    for _ in range(2):
        with Served(engine) as served:
            served.until(lambda: evaluated(engine) == {"hostile", "honest"})
        assert served.health.report()["counts"] == {}
        with writing(engine) as connection:
            connection.execute(update(schema.run).values(evaluated=0))
            connection.execute(schema.snapshot.delete())


@pytest.mark.parametrize("fails", ["hangs", "raises", "memory"])
def test_a_run_that_cannot_be_evaluated_fails_alone(engine, monkeypatch, fails, caplog):
    evaluate = run_evaluation.RunEvaluation.evaluate

    def spoilt(self, *args):
        if self.id == "hostile":
            if fails == "hangs":
                sum(1 for _ in iter(int, 1))
            raise MemoryError if fails == "memory" else ZeroDivisionError
        return evaluate(self, *args)

    monkeypatch.setattr(run_evaluation.RunEvaluation, "evaluate", spoilt)
    # That they are imported at the first evaluation is not to be paid from a budget so small.
    registry.classes()
    for run in ("first", "hostile", "last"):
        store(engine, run)
    with Served(engine, budget=2.0) as served:
        served.until(lambda: evaluated(engine) == {"first", "last"})
        served.until(lambda: served.health.report()["counts"].get("evaluation_failures", 0) > 0)
        assert served.health.report()["failing"] == {"evaluation": 1}
        # What comes later is evaluated, too: it is not tried again and again.
        store(engine, "later")
        served.wake.set()
        served.until(lambda: evaluated(engine) == {"first", "last", "later"})
    assert len([r for r in caplog.records if r.message.startswith("run hostile")]) == 1
    assert served.health.report()["missing"] == {}


def test_a_run_that_has_much_to_catch_up_with_takes_turns(engine, monkeypatch):
    load = run_evaluation.evaluation.load_new
    monkeypatch.setattr(
        run_evaluation.evaluation, "load_new", lambda *a, **o: load(*a, **o | {"limit": 2})
    )
    for seq in range(6):
        store(engine, "long", range(20 * seq, 20 * seq + 20), seq=seq)
    store(engine, "short")
    worker = Worker(engine, threading.Event(), strict=True)
    # The long one came first, and there is time for one new run alone.
    assert worker.sweep(slice_s=0.0)
    assert evaluated(engine) == set()
    assert worker.sweep(slice_s=0.0)
    assert evaluated(engine) == {"short"}
    while worker.sweep(slice_s=0.0):
        pass
    assert evaluated(engine) == {"long", "short"}
    worker.stop()


# ------------------------------------------------------------------------------------ compaction


class Compacted:
    """A compactor, until some runs are compacted."""

    def __init__(self, engine, monkeypatch, spoil=lambda run: None):
        self.engine = engine
        self.health = Health()
        self.done = threading.Condition()

        def reported(engine, run):
            spoil(run)
            more = compact(engine, run)
            with self.done:
                self.done.notify_all()
            return more

        monkeypatch.setattr(compactor, "compact", reported)
        self.compactor = compactor.Compactor(engine, health=self.health, period=0.01, share=1.0)

    def until_left(self, left):
        self.compactor.start()
        try:
            with self.done:
                for _ in range(600):
                    with reading(self.engine) as connection:
                        if {*runs_to_compact(connection)} == left:
                            return
                    self.done.wait(0.1)
            raise AssertionError("they are not compacted")
        finally:
            self.compactor.stop()


def test_the_last_step_there_is_does_not_end_the_compactor(engine, monkeypatch):
    store(engine, "hostile", [0, 2**62, 2**63 - 1])
    store(engine, "honest", range(5000))
    compacted = Compacted(engine, monkeypatch)
    compacted.until_left(set())
    assert compacted.health.report() == {"missing": {}, "counts": {}, "failing": {}}
    with reading(engine) as connection:
        assert watermarks.load(connection, run=key_of(engine, "honest")).ranks[0].end == 4992


def test_a_run_that_cannot_be_compacted_fails_alone(engine, monkeypatch, caplog):
    for run in ("first", "hostile", "last"):
        store(engine, run, range(5000))
    hostile = key_of(engine, "hostile")

    def spoil(run):
        if run == hostile:
            raise OverflowError("Python int too large to convert to C long")

    compacted = Compacted(engine, monkeypatch, spoil)
    compacted.until_left({hostile})
    report = compacted.health.report()
    assert report["counts"]["compaction_failures"] >= 1
    assert report["failing"] == {"compaction": 1}
    assert report["missing"] == {}
    assert len([r for r in caplog.records if r.levelname == "ERROR"]) == 1
