"""Exactly once, whatever the server does; bounded, whatever happens; and never in the way."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rankscope.agent import wire
from rankscope.agent.delivery.queue import BatchQueue
from rankscope.agent.delivery.records import Records
from rankscope.agent.delivery.sync import sync
from rankscope.agent.launcher import Identity
from tests.support.servers.collector import CLOSE, HANG, LOSE, Collector, Reply, wait_until
from tests.support.servers.sending import QUICK, Rank, everything_arrived

# --------------------------------------------------------------------------- with a good server


def test_everything_arrives_in_order_and_without_gaps(
    collector: Collector, rank: Callable[..., Rank]
) -> None:
    one = rank(collector, session="abc")
    for _ in range(20):
        one.train(10, fingerprints=True)
        time.sleep(0.005)
    one.sender.close()

    everything_arrived(collector, one)
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
    everything_arrived(collector, one)


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


# ---------------------------------------------------------------------------- with a bad server


def test_a_server_that_comes_late_gets_everything(
    away: Collector, rank: Callable[..., Rank]
) -> None:
    one = rank(away)
    for _ in range(10):
        one.train(10)
        time.sleep(0.01)
    wait_until(lambda: bool(one.problems))
    assert one.sender.counters.accepted == 0

    away.start()
    away.wait_for(lambda c: c.stored() == one.produced)
    one.train(10)
    one.sender.close()

    everything_arrived(away, one)
    assert away.batches[0].hello is not None
    assert [b.seq for b in away.batches] == list(range(len(away.batches)))
    assert one.spooled_files() == []
    assert len(one.problems) == 1
    assert "is away (no connection (Connection refused))" in one.problems[0]
    assert "rankscope sync" in one.problems[0]


def test_a_server_that_restarts_misses_nothing(
    collector: Collector, rank: Callable[..., Rank]
) -> None:
    one = rank(collector)
    one.train(50)
    collector.wait_for(lambda c: c.stored() == one.produced)
    for _ in range(3):
        collector.stop()
        one.train(50)
        wait_until(lambda: one.sender.counters.spooled > 0)
        collector.start()
        one.train(50)
        collector.wait_for(lambda c: c.stored() == one.produced)
    one.sender.close()

    everything_arrived(collector, one)
    assert len(one.problems) <= 1


@pytest.mark.parametrize("seed", range(6))
def test_chaos_stores_every_point_exactly_once(
    collector: Collector, rank: Callable[..., Rank], seed: int
) -> None:
    chance = random.Random(seed)
    failures = [
        CLOSE,
        LOSE,
        Reply(status=500, body="<h1>broken</h1>"),
        Reply(status=503, headers={"Retry-After": "0.01"}),
        Reply(status=429),
        Reply(status=403),
        Reply(body="<h1>wrong door</h1>"),
    ]
    collector.largest_body = chance.choice([None, 4000, 20_000])
    one = rank(collector)
    for _ in range(40):
        one.train(chance.randint(1, 8), fingerprints=chance.random() < 0.3)
        event = chance.random()
        if event < 0.3:
            collector.replies.append(chance.choice(failures))
        elif event < 0.35:
            collector.stop()
            one.train(5)
            time.sleep(chance.uniform(0.0, 0.05))
            collector.start()
        time.sleep(chance.uniform(0.0, 0.02))
        assert one.accounted() <= one.produced
    collector.replies.clear()
    wait_until(lambda: one.accounted() == one.produced and not one.sender.counters.spooled)
    one.sender.close()

    assert one.sender.counters.dropped == {}
    everything_arrived(collector, one)
    assert one.sender.counters.accepted == one.produced
    assert collector.batches[-1].through_step == one.step - 1
    assert one.spooled_files() == []


def test_a_lost_answer_is_no_lost_batch(collector: Collector, rank: Callable[..., Rank]) -> None:
    collector.replies.extend([LOSE] * 4)
    one = rank(collector)
    one.train(20)
    collector.wait_for(lambda c: c.stored() == one.produced and c.duplicates >= 2)
    one.sender.close()

    everything_arrived(collector, one)


def test_retry_after_is_honoured(collector: Collector, rank: Callable[..., Rank]) -> None:
    collector.replies.append(Reply(status=503, headers={"Retry-After": "0.5"}))
    one = rank(collector)
    collector.wait_for(lambda c: c.requests >= 1)
    began = time.monotonic()
    one.train(10)
    collector.wait_for(lambda c: c.requests >= 2)

    assert time.monotonic() - began > 0.4
    one.sender.close()
    everything_arrived(collector, one)


def test_a_busy_server_is_asked_again_later_and_loses_nothing(
    collector: Collector, rank: Callable[..., Rank]
) -> None:
    seconds = 0.2
    collector.always = Reply(status=429, headers={"Retry-After": str(seconds)})
    one = rank(collector)
    for _ in range(60):
        one.train(3, fingerprints=True)
        time.sleep(0.02)
    wait_until(lambda: one.sender.counters.spooled > 0)
    collector.wait_for(lambda c: c.requests >= 6)
    pauses = np.diff(collector.times[:6])
    collector.always = None
    wait_until(lambda: one.accounted() == one.produced and not one.sender.counters.spooled)
    one.sender.close()

    # No sooner than asked for, and not all ranks of a job at the same moment.
    assert min(pauses) >= seconds
    assert len(set(np.round(pauses, 4))) > 1
    assert one.sender.counters.dropped == {}
    everything_arrived(collector, one)
    assert len(one.problems) == 1
    assert "is busy" in one.problems[0]


def test_pauses_grow_and_stay_bounded(collector: Collector, rank: Callable[..., Rank]) -> None:
    collector.always = Reply(status=500)
    one = rank(collector, pace=replace(QUICK, first_backoff=0.02, longest_backoff=0.1))
    collector.wait_for(lambda c: c.requests >= 9)

    # Without a bound the eighth would be 1.3 to 2.6 s, without growth all together below 0.16 s.
    pauses = np.diff(collector.times[:9])
    assert pauses.sum() > 0.3
    assert np.median(pauses[-4:]) < 1.0
    one.sender.close(timeout=0.5)


def test_a_batch_that_is_too_large_is_split(
    collector: Collector, rank: Callable[..., Rank]
) -> None:
    collector.largest_body = 3000
    one = rank(collector)
    one.train(500, fingerprints=False)
    collector.wait_for(lambda c: c.stored() == one.produced)
    one.sender.close()

    everything_arrived(collector, one)
    assert one.sender.counters.accepted == one.produced
    assert one.sender.counters.dropped == {}
    assert any(batch.seq >= 2**32 for batch in collector.batches)


def test_a_fingerprint_that_is_too_large_costs_only_itself(
    collector: Collector, rank: Callable[..., Rank]
) -> None:
    collector.largest_body = 1500  # a fingerprint has 2 kB
    one = rank(collector)
    one.train(3, fingerprints=True)
    one.sender.close()

    assert collector.points("loss") == {0: 0.0, 1: 1.0, 2: 2.0}
    assert one.sender.counters.dropped == {"too_large": 3}
    assert len(one.problems) == 1
    assert "fingerprint" in one.problems[0]


def test_a_refused_batch_is_reported_once_and_counted(
    collector: Collector, rank: Callable[..., Rank]
) -> None:
    one = rank(collector)
    collector.wait_for(lambda c: len(c.batches) >= 1)
    no = Reply(status=422, body={"title": "No", "detail": "columns.loss: is odd"})
    collector.always = no
    one.train(5)
    wait_until(lambda: one.sender.counters.dropped.get("refused", 0) >= 15)
    one.train(5)
    wait_until(lambda: one.sender.counters.dropped.get("refused", 0) >= 30)
    collector.always = None
    one.train(5)
    one.sender.close()

    assert list(collector.points("loss")) == list(range(10, 15))
    assert one.accounted() == one.produced
    assert len(one.problems) == 1
    assert "columns.loss: is odd" in one.problems[0]
    assert collector.batches[-1].dropped == {"refused": 30}


def test_a_server_that_refuses_the_hello_is_not_asked_for_ever(
    collector: Collector, rank: Callable[..., Rank]
) -> None:
    collector.answer = {"hello_wanted": True}
    collector.replies.extend([Reply(status=422)])
    hellos: list[int] = []

    def hello() -> wire.Hello:
        hellos.append(1)
        if len(hellos) == 2:
            collector.replies.append(Reply(status=422))
        return wire.Hello(started_at=1.0)

    one = rank(collector, hello=hello)
    collector.wait_for(lambda c: len(c.batches) >= 8)
    one.sender.close()

    assert len(hellos) <= 3


def test_a_wrong_token_loses_nothing(collector: Collector, rank: Callable[..., Rank]) -> None:
    collector.always = Reply(status=403, body={"title": "Forbidden", "detail": "wrong token"})
    one = rank(collector)
    one.train(10)
    wait_until(lambda: bool(one.problems))
    assert "wrong token" in one.problems[0]

    collector.always = None
    collector.wait_for(lambda c: c.stored() == one.produced)
    one.sender.close()
    everything_arrived(collector, one)


def test_one_rank_of_a_node_reports_the_server(away: Collector, rank: Callable[..., Rank]) -> None:
    identity = Identity(run="run", rank=5, local_rank=1, world_size=8)
    one = rank(away, identity=identity)
    one.train(10)
    wait_until(lambda: one.sender.counters.failures >= 5)
    one.sender.close()

    assert one.problems == []
    assert one.spooled_files()


def test_the_trainers_random_numbers_are_left_alone(
    away: Collector, rank: Callable[..., Rank]
) -> None:
    random.seed(7)
    state = random.getstate()
    one = rank(away)
    wait_until(lambda: one.sender.counters.failures >= 5)
    one.sender.close()

    assert random.getstate() == state


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


def test_what_a_person_has_to_put_right_is_said_by_a_short_run_too(
    collector: Collector, rank: Callable[..., Rank]
) -> None:
    collector.always = Reply(status=401, body={"detail": "this server asks for a token"})
    one = rank(collector, pace=replace(QUICK, first_backoff=60.0, longest_backoff=60.0))
    one.train(1)
    collector.wait_for(lambda c: c.requests >= 1)
    one.sender.close(timeout=0.5)

    assert one.sender.counters.failures < 3
    [said] = one.problems
    assert "it answers 401, this server asks for a token" in said


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
    everything_arrived(collector, one)
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

    everything_arrived(collector, one)
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
    everything_arrived(away, one)
