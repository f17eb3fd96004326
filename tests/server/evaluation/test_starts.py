"""A job that is launched again under the same run id is judged by its last start."""

import threading

import numpy as np
import pytest
from sqlalchemy import delete

from rankscope.agent import wire
from rankscope.server.api.verdict import get_verdict
from rankscope.server.evaluation.worker import Worker
from rankscope.server.storage import schema
from rankscope.server.storage.database.engine import reading, writing
from rankscope.server.storage.ingest.batches import store_batch
from rankscope.server.storage.judgement.alerts import list_alerts
from rankscope.server.storage.judgement.comparisons import list_comparisons
from rankscope.server.storage.reading import runs

TABLE = wire.TensorTable(("w",), ((8, 8),), ("float32",), ("",))
RANKS = 3
# As many as `loss.spike` needs to judge, and some.
STEPS = 64


def clean(rank, step):
    return 7 + step


def faulty(rank, step):
    """Rank 2 differs since step 20."""
    return 7 + step + 1000 * (rank == 2 and step >= 20)


class Job:
    """Processes that post, and a worker, on one clock."""

    def __init__(self, engine):
        self.engine = engine
        self.time = 1000.0
        self.seq = {}
        self.worker = None
        self.restart_server()

    def restart_server(self, *, kept=True):
        if self.worker is not None:
            self.worker.stop()
        if not kept:
            with writing(self.engine) as connection:
                connection.execute(delete(schema.snapshot))
        self.worker = Worker(self.engine, threading.Event(), now=lambda: self.time, strict=True)

    def post(self, rank, session, steps, digest=clean, *, state="running", made_at=None):
        steps = np.array(list(steps), dtype=np.int64)
        seq = self.seq[rank, session] = self.seq.get((rank, session), -1) + 1
        made_at = self.time if made_at is None else made_at
        hello = wire.Hello(started_at=made_at, host="h", tables={"parameters": TABLE})
        digests = np.array([digest(rank, int(s)) for s in steps], dtype=np.uint64)
        batch = wire.Batch(
            run="r",
            rank=rank,
            seq=seq,
            session=session,
            world_size=RANKS,
            sent_at=made_at,
            through_step=int(steps[-1]) if len(steps) else -1,
            state=state,
            hello=hello if seq == 0 else None,
            columns={
                "loss": wire.Column(steps, 2.0 / (1.0 + 0.01 * steps)),
                "lr": wire.Column(steps, np.full(len(steps), 0.1)),
            },
            words={"parameters": wire.Column(steps, digests)},
        )
        with writing(self.engine) as connection:
            store_batch(connection, batch, received_at=self.time)

    def train(self, session, digest=clean, *, first=0, last=STEPS, state="finished", evaluate=True):
        """One launch of all ranks, from its first step to its end."""
        self.time += 20.0
        for low in range(first, last, 16):
            self.time += 1.0
            for rank in range(RANKS):
                self.post(rank, session, range(low, min(low + 16, last)), digest)
            if evaluate:
                self.worker.sweep()
        self.time += 1.0
        for rank in range(RANKS):
            self.post(rank, session, [], state=state)
        if evaluate:
            self.sweep()

    def sweep(self):
        for _ in range(3):
            self.time += 1.0
            while self.worker.sweep():
                pass

    @property
    def verdict(self):
        return get_verdict(self.engine, "r")

    def alerts(self, kind="desync.parameters"):
        """State, start and steps, oldest first."""
        with reading(self.engine) as connection:
            run = runs.find_run(connection, "r").key
            found = list_alerts(connection, limit=99, run=run, kind=kind, consequences=True)[0]
        return [(a.state, a.start, a.first_step, a.last_step) for a in reversed(found)]

    def compared(self):
        """First and last step of the comparisons of parameters, and whether they were equal."""
        with reading(self.engine) as connection:
            run = runs.find_run(connection, "r").key
            found, _ = list_comparisons(connection, run=run, limit=99, stage="parameters")
        return [(s.comparison.step, s.until_step, s.comparison.equal) for s in found]


@pytest.fixture
def job(engine):
    return Job(engine)


def test_a_clean_start_after_a_faulty_one_passes(job):
    job.train("a", faulty)
    assert job.verdict.verdict == "fail"
    job.train("b")
    assert (job.verdict.verdict, job.verdict.reasons) == ("pass", [])
    assert job.alerts() == [("resolved", 0, 20, STEPS - 1)]
    assert job.compared() == [(0, STEPS - 1, True)]
    assert job.verdict.start == 1


def test_a_faulty_start_after_a_clean_one_fails(job):
    job.train("a")
    assert job.verdict.verdict == "pass"
    job.train("b", faulty)
    assert job.verdict.verdict == "fail"
    assert job.alerts() == [("open", 1, 20, STEPS - 1)]


def test_the_same_fault_in_every_start_is_an_alert_of_each(job):
    for session in "abc":
        job.train(session, faulty)
        assert job.verdict.verdict == "fail"
    states = [(state, start) for state, start, _, _ in job.alerts()]
    assert states == [("resolved", 0), ("resolved", 1), ("open", 2)]


def test_a_start_is_no_pass_before_it_is_evaluated_nor_a_fail_by_the_one_before(job):
    job.train("a", faulty)
    job.train("b", evaluate=False)
    assert (job.verdict.verdict, job.verdict.evaluated) == ("pending", False)
    job.sweep()
    assert job.verdict.verdict == "pass"


def test_a_start_that_has_just_begun_has_not_passed(job):
    job.train("a")
    job.time += 20
    for rank in range(RANKS):
        job.post(rank, "b", range(4))
    job.sweep()
    assert (job.verdict.verdict, job.verdict.so_far) == ("pending", "pending")
    with reading(job.engine) as connection:
        run = runs.find_run(connection, "r")
    assert (run.state, run.last_step, run.evaluated_step) == ("running", 3, 3)


def test_one_that_ends_after_fewer_steps_is_judged_by_these_alone(job):
    """The first start's checks would pass it."""
    job.train("a")
    job.train("b", last=4)
    verdict = job.verdict
    assert verdict.verdict == "pending"
    [spike] = [r for r in verdict.required if r.name == "loss.spike"]
    assert spike.state == "not_judged"


def test_an_error_of_the_start_before_fails_no_other(job):
    job.train("a", last=30, state="failed")
    assert job.verdict.verdict == "fail"
    job.train("b")
    assert (job.verdict.verdict, job.verdict.reasons) == ("pass", [])


def test_processes_that_were_killed_are_replaced_one_after_the_other(job):
    job.time += 20
    for low in range(0, 48, 16):
        job.time += 1
        for rank in range(RANKS):
            job.post(rank, "a", range(low, low + 16), faulty)
        job.sweep()
    for rank in range(RANKS):  # within the time that a rank is waited for
        job.time += 2
        job.post(rank, "b", range(4))
        job.sweep()
    job.train("b", first=4)
    assert (job.verdict.verdict, job.verdict.reasons) == ("pass", [])
    assert job.compared() == [(0, STEPS - 1, True)]


def test_what_the_start_before_left_on_disk_changes_nothing(job):
    job.train("a", faulty, last=48)
    made_at = job.time
    job.train("b", last=48, state="running")
    for rank in range(RANKS):
        job.post(rank, "a", range(48, STEPS), faulty, made_at=made_at)
    job.sweep()
    job.train("b", first=48)
    assert (job.verdict.verdict, job.verdict.reasons) == ("pass", [])
    assert job.compared() == [(0, STEPS - 1, True)]


@pytest.mark.parametrize("when", ["between", "amid", "after"])
@pytest.mark.parametrize("kept", [True, False], ids=["snapshot", "replay"])
def test_a_server_that_restarts_comes_to_the_same(job, when, kept):
    job.train("a", faulty)
    if when == "between":
        job.restart_server(kept=kept)
    job.train("b", faulty, last=32, state="running")
    if when == "amid":
        job.restart_server(kept=kept)
    job.train("b", faulty, first=32)
    if when == "after":
        job.restart_server(kept=kept)
        job.sweep()
    assert job.alerts() == [("resolved", 0, 20, STEPS - 1), ("open", 1, 20, STEPS - 1)]
    assert job.verdict.verdict == "fail"
    job.train("c")
    assert (job.verdict.verdict, job.verdict.reasons) == ("pass", [])


def test_a_rank_that_is_replaced_alone_goes_on_with_the_run(job):
    job.time += 20
    sessions = dict.fromkeys(range(RANKS), "a")
    for low in range(0, STEPS, 16):
        job.time += 1
        for rank in range(RANKS):
            job.post(rank, sessions[rank], range(low, low + 16), faulty)
        job.sweep()
        if low == 16:
            job.post(1, "a", [], state="failed")
            sessions[1] = "b"
            job.time += 5
            job.post(1, "b", range(4), faulty)  # as one that counts its own steps
    for rank in range(RANKS):
        job.post(rank, sessions[rank], [], state="finished")
    job.sweep()
    assert job.alerts() == [("open", 0, 20, STEPS - 1)]
    assert (job.verdict.verdict, job.verdict.start) == ("fail", 0)


def test_a_job_that_goes_on_from_a_checkpoint_is_the_same_run(job):
    job.train("a", faulty, last=40)
    job.train("b", faulty, first=32)
    assert (job.verdict.start, job.verdict.resumed_step) == (0, 32)
    assert job.alerts() == [("open", 0, 20, STEPS - 1)]
    assert job.verdict.verdict == "fail"
    assert job.compared() == [
        (0, 19, True),
        (20, STEPS - 1, False),
    ]


def test_what_was_over_before_the_checkpoint_does_not_count(job):
    def diverged(rank, step):
        return 7 + step + 1000 * (rank == 2 and 8 <= step < 12)

    job.train("a", diverged, last=40)
    assert job.verdict.verdict == "fail"
    job.train("b", first=32, last=90)
    assert [state for state, *_ in job.alerts()] == ["resolved"]
    assert (job.verdict.verdict, job.verdict.reasons) == ("pass", [])


def test_what_was_seen_after_the_checkpoint_does(job):
    def diverged(rank, step):
        return 7 + step + 1000 * (rank == 2 and 34 <= step < 38)

    job.train("a", diverged, last=60)
    job.train("b", first=32, last=120)
    assert job.verdict.verdict == "fail"


def test_what_one_process_trains_one_after_the_other_is_judged_together(job):
    """A clean training undoes no faulty one before it in the same process."""
    job.train("a.0", faulty)
    job.train("a.1")
    assert job.verdict.verdict == "fail"
    assert (job.verdict.first_start, job.verdict.start) == (0, 1)
    assert job.compared() == [(0, STEPS - 1, True)]
    job.train("b.0")
    assert (job.verdict.verdict, job.verdict.reasons) == ("pass", [])
