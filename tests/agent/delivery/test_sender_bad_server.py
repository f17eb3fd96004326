"""A server that is away, slow or broken, or refuses: what can arrive does, and exactly once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from rankscope.agent import wire
from rankscope.agent.launcher import Identity
from tests.support.servers.collector import CLOSE, LOSE, Collector, Reply, wait_until
from tests.support.servers.sending import QUICK, Rank, assert_everything_arrived


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

    assert_everything_arrived(away, one)
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

    assert_everything_arrived(collector, one)
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
    assert_everything_arrived(collector, one)
    assert one.sender.counters.accepted == one.produced
    assert collector.batches[-1].through_step == one.step - 1
    assert one.spooled_files() == []


def test_a_lost_answer_is_no_lost_batch(collector: Collector, rank: Callable[..., Rank]) -> None:
    collector.replies.extend([LOSE] * 4)
    one = rank(collector)
    one.train(20)
    collector.wait_for(lambda c: c.stored() == one.produced and c.duplicates >= 2)
    one.sender.close()

    assert_everything_arrived(collector, one)


def test_retry_after_is_honoured(collector: Collector, rank: Callable[..., Rank]) -> None:
    collector.replies.append(Reply(status=503, headers={"Retry-After": "0.5"}))
    one = rank(collector)
    collector.wait_for(lambda c: c.requests >= 1)
    began = time.monotonic()
    one.train(10)
    collector.wait_for(lambda c: c.requests >= 2)

    assert time.monotonic() - began > 0.4
    one.sender.close()
    assert_everything_arrived(collector, one)


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
    assert_everything_arrived(collector, one)
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

    assert_everything_arrived(collector, one)
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
    assert_everything_arrived(collector, one)


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


def test_what_a_person_has_to_put_right_is_said_by_a_short_run_too(
    collector: Collector, rank: Callable[..., Rank]
) -> None:
    refusal = {
        "status": 401,
        "detail": "this server asks for a token",
        "instance": "/api/v1/ingest",
    }
    collector.always = Reply(status=401, body=refusal)
    one = rank(collector, pace=replace(QUICK, first_backoff=60.0, longest_backoff=60.0))
    one.train(1)
    collector.wait_for(lambda c: c.requests >= 1)
    one.sender.close(timeout=0.5)

    assert one.sender.counters.failures < 3
    [said] = one.problems
    assert "does not let this job in (it answers 401, this server asks for a token)" in said
    assert "Set RANKSCOPE_TOKEN to a token with the scope write" in said
    assert "away" not in said
