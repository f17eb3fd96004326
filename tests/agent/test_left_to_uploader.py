"""What is left to the uploader: the answer is read with the next batch, unless it says something.

Waking up for an answer would lengthen another step of the training.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from support.collector import HANG, Collector, Reply, wait_until
from support.sending import QUICK, Rank, everything_arrived
from support.uploaders import uploaders

from rankscope.agent import wire
from rankscope.agent.transport import Accepted, Away, Transport
from rankscope.agent.uploader import Uploader

BODY = wire.encode(wire.Batch(run="r", rank=0, seq=0))
# Long beside what an answer takes, on a busy machine too.
LONG_SECONDS = 2.0


@pytest.fixture
def transport(collector: Collector) -> Iterator[Transport]:
    """One whose uploader has posted, twice, and was answered the same."""
    made = Transport(collector.url, None, read_timeout=LONG_SECONDS, uploader_after=0.0)
    wait_until(lambda: isinstance(made.post(BODY), Accepted) and made._uploader_proven)
    made.post(BODY)
    assert listened(made, 0.01) < LONG_SECONDS
    yield made
    made.close()


def listened(transport: Transport, seconds: float = LONG_SECONDS) -> float:
    began = time.monotonic()
    transport.listen(seconds)
    return time.monotonic() - began


def test_nothing_is_left_to_an_uploader_that_was_not_seen_to_post(collector: Collector) -> None:
    transport = Transport(collector.url, None)
    assert not transport.leave(BODY)
    transport.post(BODY)
    assert not transport.leave(BODY)
    assert not transport.busy
    transport.close()


def test_an_answer_that_says_what_the_last_one_said_waits(
    collector: Collector, transport: Transport
) -> None:
    seen = collector.requests
    assert transport.leave(BODY)
    assert transport.busy
    assert listened(transport, 0.5) >= 0.5
    assert collector.requests == seen + 1
    assert isinstance(transport.outcome(), Accepted)
    assert not transport.busy


@pytest.mark.parametrize(
    "answer", [{"dense_until": 70}, {"hello_wanted": True}], ids=["dense", "hello"]
)
def test_an_answer_that_says_more_is_heard_at_once(
    collector: Collector, transport: Transport, answer: dict[str, object]
) -> None:
    collector.answer = answer
    assert transport.leave(BODY)
    assert listened(transport) < LONG_SECONDS
    outcome = transport.outcome()
    assert isinstance(outcome, Accepted)
    (name,) = answer
    assert getattr(outcome.answer, name) == answer[name]

    # Said again it is nothing new; no more of it is.
    assert transport.leave(BODY)
    assert listened(transport, 0.5) >= 0.5
    assert isinstance(transport.outcome(), Accepted)
    collector.answer = {}
    assert transport.leave(BODY)
    assert listened(transport) < LONG_SECONDS
    assert isinstance(transport.outcome(), Accepted)


def test_a_failure_is_heard_at_once_each_time(collector: Collector, transport: Transport) -> None:
    collector.always = Reply(status=503)
    for _ in range(2):
        assert transport.leave(BODY)
        assert listened(transport) < LONG_SECONDS
        assert isinstance(transport.outcome(), Away)
    collector.stop()
    assert transport.leave(BODY)
    assert listened(transport) < LONG_SECONDS
    assert transport.outcome() == Away("no connection (Connection refused)")


def test_there_is_no_outcome_before_the_answer(
    collector: Collector, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankscope.agent.uploader._PATIENCE_SECONDS", 0.0)
    transport._connect_timeout = 0.5
    collector.always = HANG
    assert transport.leave(BODY)
    assert transport.outcome() is None
    assert transport.busy
    # The uploader gives up at the server's time, we a little after it.
    time.sleep(0.5 + LONG_SECONDS + 0.2)
    outcome = transport.outcome()
    assert not transport.busy
    assert outcome is None or isinstance(outcome, Away)


def test_one_that_is_killed_is_heard_and_lost(transport: Transport) -> None:
    told: list[str] = []
    transport._uploader_lost = told.append
    uploader = transport._uploader
    assert uploader is not None
    assert uploader._process is not None
    trainer = str(os.getpid()).encode()
    for pid in uploaders():
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if trainer in file.read().split(b"\0"):
                os.kill(pid, signal.SIGKILL)
    transport.leave(BODY)
    assert listened(transport) < LONG_SECONDS
    assert transport.outcome() is None
    assert not transport.busy
    assert [why.split(" (")[0] for why in told] == ["it has ended"]
    assert isinstance(transport.post(BODY), Accepted)


def test_listening_can_be_interrupted(collector: Collector, transport: Transport) -> None:
    collector.always = HANG
    assert transport.leave(BODY)
    threading.Timer(0.2, transport.interrupt).start()
    assert listened(transport) < LONG_SECONDS


def test_an_answer_that_was_there_before_the_interruption_is_not_lost(
    collector: Collector, transport: Transport
) -> None:
    assert transport.leave(BODY)
    seen = collector.requests
    collector.wait_for(lambda c: c.requests >= seen)
    time.sleep(0.3)
    transport.interrupt()
    assert isinstance(transport.outcome(), Accepted)


# -------------------------------------------------------------------------------------- in a sender


PACE = replace(QUICK, read_timeout=LONG_SECONDS, heartbeat=60.0, uploader_after=0.0)


def by_uploader(one: Rank) -> Transport:
    """Trains until the uploader posts; the sender's transport."""
    transport = one.sender._delivery._transport
    assert transport is not None

    def proven() -> bool:
        one.train(1)
        return transport._uploader_proven

    wait_until(proven)
    return transport


def test_batches_are_left_to_the_uploader_one_at_a_time(
    collector: Collector, rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rank(collector, pace=PACE)
    by_uploader(one)
    left: list[bool] = []
    send = Uploader.send

    def sent(self: Uploader, body: bytes, *, connect: float, read: float) -> None:
        left.append(self.busy)
        send(self, body, connect=connect, read=read)

    monkeypatch.setattr(Uploader, "send", sent)
    for _ in range(50):
        one.train(1)
        time.sleep(0.005)
    wait_until(lambda: one.sender.counters.waiting == 0)
    assert len(left) > 5
    assert not any(left)
    one.sender.close()
    everything_arrived(collector, one)
    assert collector.duplicates == 0


def test_a_wish_is_heard_before_the_next_batch(
    collector: Collector, rank: Callable[..., Rank]
) -> None:
    one = rank(collector, pace=replace(PACE, steady_after=1.0, steady_batch=60.0))
    by_uploader(one)
    collector.answer = {"dense_until": 10**6}
    seen = collector.requests
    one.train(1)
    wait_until(lambda: one.sender.dense_until == 10**6)
    assert collector.requests <= seen + 3


def test_closing_with_an_answer_that_is_there_posts_nothing_twice(
    collector: Collector, rank: Callable[..., Rank]
) -> None:
    one = rank(collector, pace=replace(PACE, batch=0.5))
    transport = by_uploader(one)
    one.train(1)
    wait_until(lambda: transport.busy)
    time.sleep(0.2)
    assert transport.busy
    one.sender.close()
    everything_arrived(collector, one)
    assert collector.duplicates == 0
    assert collector.batches[-1].state == "finished"


def test_closing_while_the_answer_is_out_loses_nothing(
    collector: Collector, rank: Callable[..., Rank]
) -> None:
    one = rank(collector, pace=PACE)
    transport = by_uploader(one)
    collector.replies.append(HANG)
    one.train(1)
    wait_until(lambda: transport.busy and not collector.replies)
    began = time.monotonic()
    one.sender.close()
    assert time.monotonic() - began < LONG_SECONDS
    everything_arrived(collector, one)
    assert one.problems == []


def test_an_idle_rank_goes_on_giving_signs_of_life(
    collector: Collector, rank: Callable[..., Rank]
) -> None:
    one = rank(collector, pace=replace(PACE, heartbeat=0.1))
    by_uploader(one)
    count = len(collector.batches)
    collector.wait_for(lambda c: len(c.batches) >= count + 10)
    times = collector.times[-8:]
    assert (times[-1] - times[0]) / 7 < 0.3


def test_a_rank_that_stands_still_is_heard_of_as_often_as_at_its_start(
    collector: Collector, rank: Callable[..., Rank]
) -> None:
    pace = replace(PACE, heartbeat=0.1, steady_after=0.0, steady_batch=1.0)
    one = rank(collector, pace=pace)
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        one.train(1)
        time.sleep(0.005)
    steady = [b.sent_at for b in collector.batches if b.sent_at > time.time() - 2.5]
    collector.wait_for(lambda c: len(c.batches) > 40)
    still = [b.sent_at for b in collector.batches][-10:]
    assert len(steady) <= 4
    assert (still[-1] - still[0]) / 9 < 0.4
