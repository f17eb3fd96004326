"""Exactly once, whatever the server does; bounded, whatever happens; and never in the way."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rankscope.agent.delivery.queue import BatchQueue
from rankscope.agent.delivery.records import Records
from rankscope.agent.delivery.sync import sync
from rankscope.agent.launcher import Identity
from tests.support.servers.collector import HANG, Collector, wait_until
from tests.support.servers.sending import QUICK, Rank, assert_everything_arrived

# --------------------------------------------------------------------------- with a good server


def test_everything_arrives_in_order_and_without_gaps(
    collector: Collector, rank: Callable[..., Rank]
) -> None:
    one = rank(collector, session="abc")
    for _ in range(20):
        one.train(10, fingerprints=True)
        time.sleep(0.005)
    one.sender.close()

    assert_everything_arrived(collector, one)
    batches = collector.batches
    assert [b.seq for b in batches] == list(range(len(batches)))
    assert {b.session for b in batches} == {"abc"}
    through = [b.through_step for b in batches]
    assert through == sorted(through)
    assert through[-1] == 199
    assert [b.state for b in batches] == ["running"] * (len(batches) - 1) + ["finished"]
    # A batch never claims a step that a later one still adds to.
    for earlier, later in zip(batches, batches[1:], strict=False):
        for column in (*later.columns.values(), *later.words.values()):
            assert int(column.steps.min()) > earlier.through_step
    assert one.problems == []
    assert one.sender.counters.accepted == one.produced
    assert not one.options.spool.exists()


def test_hello_comes_first_and_once(collector: Collector, rank: Callable[..., Rank]) -> None:
    identity = Identity(run="run", rank=3, local_rank=1, world_size=8, attempt=2)
    one = rank(collector, identity=identity)
    one.train(10)
    one.sender.close("failed", "RuntimeError: boom")

    first, *others = collector.batches
    assert first.hello is not None
    assert first.hello.config == {"lr": 0.1}
    assert first.hello.heartbeat_seconds == QUICK.heartbeat
    assert all(batch.hello is None for batch in others)
    assert (first.rank, first.world_size, first.attempt) == (3, 8, 2)
    assert others[-1].error == "RuntimeError: boom"
    assert others[-1].state == "failed"


@pytest.mark.contained
def test_a_hello_that_is_lost_on_the_way_to_the_queue_is_said_again(
    collector: Collector, rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    put = BatchQueue.put
    failed: list[int] = []

    def fails_once(queue: BatchQueue, seq: int, body: bytes, **kinds: Any) -> None:
        if not failed:
            failed.append(seq)
            raise MemoryError
        put(queue, seq, body, **kinds)

    monkeypatch.setattr(BatchQueue, "put", fails_once)
    one = rank(collector)
    one.train(10)
    collector.wait_for(lambda c: len(c.batches) >= 1)
    one.sender.close()

    assert failed == [0]
    assert collector.batches[0].hello is not None


def test_an_idle_rank_gives_signs_of_life(collector: Collector, rank: Callable[..., Rank]) -> None:
    phases = iter(["forward", "backward"])
    one = rank(collector, phase=lambda: next(phases, "step"))
    began = time.monotonic()

    collector.wait_for(lambda c: len(c.batches) >= 6)

    assert time.monotonic() - began > 4 * QUICK.heartbeat
    batches = collector.batches
    assert [b.phase for b in batches[:3]] == ["forward", "backward", "step"]
    assert all(b.points == 0 for b in batches)
    one.sender.close()


def test_dense_sampling_requests_of_the_server_are_heard(
    collector: Collector, rank: Callable[..., Rank]
) -> None:
    one = rank(collector)
    collector.wait_for(lambda c: len(c.batches) >= 1)
    assert one.sender.dense_until is None
    collector.answer = {"dense_until": 64}
    wait_until(lambda: one.sender.dense_until == 64)

    collector.answer = {"hello_wanted": True}
    collector.wait_for(lambda c: sum(b.hello is not None for b in c.batches) >= 2)
    assert one.sender.dense_until == 64


@pytest.mark.parametrize(
    ("dense_until", "least", "most"), [(None, 3, 7), (5, 3, 7), (10**6, 15, 200)]
)
def test_batches_come_less_often_once_all_is_steady(
    collector: Collector,
    rank: Callable[..., Rank],
    dense_until: int | None,
    least: int,
    most: int,
) -> None:
    collector.answer = {"dense_until": dense_until}
    one = rank(collector, pace=replace(QUICK, steady_after=0.3, steady_batch=0.2))
    began = time.monotonic()
    counts = []
    for until in (0.3, 0.6, 1.6):
        while time.monotonic() - began < until:
            one.train(1)
            time.sleep(0.005)
        counts.append(len(collector.batches))

    early, before, after = counts
    assert early > 8
    assert least <= after - before <= most
    one.sender.close()
    assert_everything_arrived(collector, one)


def test_ranks_of_a_host_make_their_batches_at_the_same_moments(
    collector: Collector, rank: Callable[..., Rank]
) -> None:
    pace = replace(QUICK, steady_after=0.0, steady_batch=0.4)
    ranks = []
    for number in range(3):
        ranks.append(rank(collector, pace=pace, identity=Identity(run="run", rank=number)))
        time.sleep(0.13)
    began = time.time()
    while time.time() < began + 3.0:
        for one in ranks:
            one.train(1)
        time.sleep(0.01)

    sent = {
        number: [b.sent_at for b in collector.batches if b.rank == number and b.sent_at > began + 1]
        for number in range(3)
    }
    # A busy machine wakes one of them late now and then.
    distances = [
        min(abs(at - other) for other in sent[number]) for number in (1, 2) for at in sent[0]
    ]
    assert len(sent[0]) >= 3
    assert sorted(distances)[len(distances) // 2] < 0.05
    for one in ranks:
        one.sender.close()


def test_losses_travel_with_each_batch(collector: Collector, rank: Callable[..., Rank]) -> None:
    one = rank(collector)
    one.records.scalars(0, {"bad\nname": 1.0, "loss": 2.0})
    one.sender.close()

    assert collector.batches[-1].dropped == {"bad_name": 1}
    assert collector.points("loss") == {0: 2.0}


def test_connected_is_said_once(collector: Collector, rank: Callable[..., Rank]) -> None:
    said: list[int] = []
    one = rank(collector, on_connected=lambda: said.append(1))
    collector.wait_for(lambda c: len(c.batches) >= 3)
    one.sender.close()

    assert said == [1]


def test_what_is_read_late_is_prepared_before_each_drain(
    collector: Collector, rank: Callable[..., Rank]
) -> None:
    records = Records()
    late = iter(range(1000))
    one = rank(collector, records=records, prepare=lambda: records.scalars(next(late), {"x": 1.0}))
    collector.wait_for(lambda c: len(c.points("x")) > 3)
    one.sender.close()

    assert list(collector.points("x")) == list(range(len(collector.points("x"))))


# --------------------------------------------------------------------------------------- bounds


def test_the_training_thread_never_waits(collector: Collector, rank: Callable[..., Rank]) -> None:
    collector.always = HANG
    one = rank(collector, pace=replace(QUICK, read_timeout=30.0))
    collector.wait_for(lambda c: c.requests > 0)
    longest = 0.0
    for _ in range(2000):
        began = time.perf_counter()
        one.train(1)
        longest = max(longest, time.perf_counter() - began)

    # Nothing of the network, which hangs for half a minute; the rest is a busy machine.
    assert longest < 1.0
    one.sender.close(timeout=0.5)


def test_memory_is_bounded_while_the_server_hangs(
    collector: Collector, rank: Callable[..., Rank]
) -> None:
    collector.always = HANG
    slow = replace(QUICK, read_timeout=0.5)
    one = rank(collector, records=Records(limit=3000), pace=slow)
    collector.wait_for(lambda c: c.requests > 0)
    one.train(20_000)

    assert one.records.waiting <= 3000
    one.sender.close(timeout=0.5)
    counters = one.sender.counters
    assert counters.dropped["memory_full"] > 0
    assert one.accounted() == one.produced
    assert counters.waiting == 0


# ------------------------------------------------------------------------------- without server


def test_offline_sends_nothing_and_spools_all(
    collector: Collector, rank: Callable[..., Rank]
) -> None:
    one = rank(collector, options={"mode": "offline"})
    for _ in range(5):
        one.train(10)
        time.sleep(0.02)
    wait_until(lambda: len(one.spooled_files()) >= 2)
    one.sender.close()

    assert collector.connections == 0
    assert one.sender.counters.spooled == one.produced
    assert len(one.problems) == 1

    report = sync(one.options.spool, collector.url, None)
    assert (report.left, report.duplicates, report.runs) == (0, 0, ["run"])
    assert_everything_arrived(collector, one)
    assert collector.batches[0].hello is not None
    assert collector.batches[-1].state == "finished"


def test_a_rank_takes_over_what_the_one_before_it_left(
    away: Collector, rank: Callable[..., Rank]
) -> None:
    first = rank(away, session="first")
    first.train(10)
    first.sender.close()
    other = rank(away, identity=Identity(run="run", rank=1), session="other")
    other.train(10)
    other.sender.close()
    assert len({path.parent for path in first.spooled_files()}) == 2

    away.start()
    second = rank(away, session="second")
    second.step = 10
    second.train(10)
    away.wait_for(lambda c: len(c.points("loss", rank=0)) == 20)
    second.sender.close()

    sessions = [b.session for b in away.batches]
    assert sessions == sorted(sessions)  # "first" before "second"
    assert {path.parent.name for path in second.spooled_files()} == {"1-other"}


# ----------------------------------------------------------------------------------- own faults


@pytest.mark.contained
def test_faults_of_what_it_calls_do_not_stop_it(
    collector: Collector, rank: Callable[..., Rank]
) -> None:
    def fail() -> Any:
        raise RuntimeError("boom")

    one = rank(collector, prepare=fail, hello=fail, phase=fail, on_connected=fail)
    one.train(10)
    collector.wait_for(lambda c: c.stored() == one.produced)
    one.train(10)
    one.sender.close()

    assert_everything_arrived(collector, one)
    reported = " ".join(one.problems)
    assert "RuntimeError: boom" in reported
    events = [event for batch in collector.batches for event in batch.events]
    assert {e.text.split(":")[0] for e in events} == {"prepare", "hello", "phase", "connected"}
    assert {e.kind for e in events} == {"agent.fault"}
    assert len(events) == 4


@pytest.mark.contained
def test_a_report_that_fails_does_not_stop_it(away: Collector, rank: Callable[..., Rank]) -> None:
    def fail(text: str) -> None:
        raise OSError("stderr is closed")

    one = rank(away, on_problem=fail)
    one.train(10)
    wait_until(lambda: one.sender.counters.failures >= 5)
    away.start()
    away.wait_for(lambda c: c.stored() == one.produced)
    one.sender.close()
    assert_everything_arrived(away, one)
    faults = [e.text for b in away.batches for e in b.events if e.kind == "agent.fault"]
    assert [text for text in faults if text.startswith("report: OSError: stderr is closed")]
