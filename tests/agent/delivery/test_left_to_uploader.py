"""What is left to the uploader: the answer is read with the next batch, unless it says something.

Waking up for an answer would lengthen another step of the training.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from rankscope.agent import wire
from rankscope.agent.delivery.transport import Accepted, Away, Transport
from rankscope.agent.delivery.uploader import Uploader
from tests.support.collector import Collector, Reply, wait_until
from tests.support.sending import QUICK, Rank, everything_arrived
from tests.support.uploaders import uploaders

BODY = wire.encode(wire.Batch(run="r", rank=0, seq=0))
# The uploader has the lowest priority: on a busy machine it may take seconds to answer.
LONG_SECONDS = 30.0


@pytest.fixture
def transport(collector: Collector) -> Iterator[Transport]:
    """One whose uploader has posted and was answered the same twice."""
    made = Transport(collector.url, None, read_timeout=LONG_SECONDS, uploader_after=0.0)
    wait_until(lambda: isinstance(made.post(BODY), Accepted) and made._uploader_proven)
    for _ in range(2):
        assert isinstance(made.post(BODY), Accepted)
    made.listen(0.01)
    yield made
    made.close()


def listened(transport: Transport, seconds: float = LONG_SECONDS) -> float:
    began = time.monotonic()
    transport.listen(seconds)
    return time.monotonic() - began


def answered(transport: Transport) -> None:
    """Waits until the answer lies there, without reading it."""
    assert transport._uploader is not None
    readable, _, _ = select.select([transport._uploader._socket], [], [], LONG_SECONDS)
    assert readable


def test_nothing_is_left_to_an_uploader_that_was_not_seen_to_post(collector: Collector) -> None:
    transport = Transport(collector.url, None)
    assert not transport.leave(BODY)
    transport.post(BODY)
    assert not transport.leave(BODY)
    assert not transport.busy
    assert transport.outcome() is None
    transport.close()


def test_an_answer_that_says_what_the_last_one_said_is_not_heard(
    collector: Collector, transport: Transport
) -> None:
    seen = collector.requests
    assert transport.leave(BODY)
    assert transport.busy
    answered(transport)
    assert listened(transport, 0.3) >= 0.3
    assert isinstance(transport.outcome(), Accepted)
    assert collector.requests == seen + 1
    assert not transport.busy
    assert transport.outcome() is None


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

    # Said again it is nothing new; said no more, it is.
    assert transport.leave(BODY)
    answered(transport)
    assert listened(transport, 0.3) >= 0.3
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


def test_a_bell_that_nobody_listens_to_does_not_stop_the_uploader(
    collector: Collector, transport: Transport
) -> None:
    collector.always = Reply(status=503)
    uploader = transport._uploader
    # A socket has room for fewer: some hundred writes of a byte.
    for _ in range(1000):
        assert isinstance(transport.post(BODY), Away)
    assert transport._uploader is uploader
    collector.always = None
    assert isinstance(transport.post(BODY), Accepted)


def test_there_is_no_outcome_before_the_answer(collector: Collector, transport: Transport) -> None:
    collector.held = threading.Event()
    assert transport.leave(BODY)
    assert transport.outcome() is None
    assert transport.busy
    collector.held.set()
    answered(transport)
    assert isinstance(transport.outcome(), Accepted)


def test_an_answer_that_never_comes(collector: Collector, transport: Transport) -> None:
    told: list[str] = []
    transport._uploader_lost = told.append
    uploader = transport._uploader
    assert uploader is not None
    collector.held = threading.Event()
    assert transport.leave(BODY)
    assert uploader._owed is not None
    uploader._owed = uploader._owed[0], time.monotonic()
    assert transport.outcome() is None
    assert not transport.busy
    assert [why[:20] for why in told] == ["no answer of it with"]


def test_one_that_is_killed_is_heard_and_lost(transport: Transport) -> None:
    told: list[str] = []
    transport._uploader_lost = told.append
    for pid in uploaders(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if transport.leave(BODY):
        assert listened(transport) < LONG_SECONDS
        answered(transport)
        assert transport.outcome() is None
    assert not transport.busy
    assert [why.split(" (")[0] for why in told] == ["it has ended"]
    assert isinstance(transport.post(BODY), Accepted)


def test_listening_can_be_interrupted(collector: Collector, transport: Transport) -> None:
    collector.held = threading.Event()
    assert transport.leave(BODY)
    threading.Timer(0.2, transport.interrupt).start()
    assert listened(transport) < LONG_SECONDS


def test_an_answer_that_was_there_before_the_interruption_is_not_lost(transport: Transport) -> None:
    assert transport.leave(BODY)
    answered(transport)
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
    wait_until(lambda: not transport.busy and one.sender.counters.waiting == 0)
    return transport


def left_for_long(
    collector: Collector,
    rank: Callable[..., Rank],
    monkeypatch: pytest.MonkeyPatch,
    **answer: int,
) -> tuple[Rank, Transport, threading.Event]:
    """A rank of which one post is left, its answer held until the event is set.

    No other batch comes for an hour. The answer says what is given besides the usual.
    """
    one = rank(collector, pace=PACE)
    transport = by_uploader(one)
    collector.answer = answer
    collector.held = held = threading.Event()
    one.train(1)
    wait_until(lambda: transport.busy)
    monkeypatch.setattr(one.sender, "_until_next_batch", lambda now: 3600.0)
    wait_until(lambda: one.sender._next_batch > time.monotonic() + 60)
    return one, transport, held


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

    def enough() -> bool:
        one.train(1)
        return len(left) > 5

    wait_until(enough)
    wait_until(lambda: one.sender.counters.waiting == 0)
    assert not any(left)
    one.sender.close()
    everything_arrived(collector, one)
    assert collector.duplicates == 0


def test_a_wish_is_heard_before_the_next_batch(
    collector: Collector, rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _, held = left_for_long(collector, rank, monkeypatch, dense_until=10**6)
    assert one.sender.dense_until is None
    held.set()
    wait_until(lambda: one.sender.dense_until == 10**6)


def test_closing_with_an_answer_that_is_there_posts_nothing_twice(
    collector: Collector, rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, transport, held = left_for_long(collector, rank, monkeypatch)
    held.set()
    answered(transport)
    assert transport.busy
    one.sender.close()
    everything_arrived(collector, one)
    assert collector.duplicates == 0
    assert collector.batches[-1].state == "finished"


def test_closing_while_the_answer_is_out_loses_nothing(
    collector: Collector, rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _, held = left_for_long(collector, rank, monkeypatch)
    collector.held = None
    one.sender.close()
    held.set()
    everything_arrived(collector, one)
    assert collector.duplicates == 1
    assert one.problems == []


def test_a_batch_that_was_given_up_while_it_was_posted_is_counted_once(
    collector: Collector, rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, transport, held = left_for_long(collector, rank, monkeypatch)
    lost = one.sender.counters.waiting
    with one.sender._turn:
        assert one.sender._delivery._outbox._evict(on_disk=False)
    assert one.sender.counters.dropped == {"memory_full": lost}
    held.set()
    answered(transport)
    one.sender._delivery.settle()
    assert one.accounted() == one.produced


def test_a_fault_in_what_follows_from_an_answer_does_not_cost_the_uploader(
    collector: Collector, rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, transport, held = left_for_long(collector, rank, monkeypatch)
    delivery = one.sender._delivery

    def full(*given: object) -> None:
        raise MemoryError

    held.set()
    answered(transport)
    with monkeypatch.context() as changed:
        changed.setattr(delivery, "_conclude", full)
        with pytest.raises(MemoryError):
            delivery.settle()
    assert not delivery.left
    delivery.settle()
    assert transport._uploader_proven


def test_an_idle_rank_goes_on_giving_signs_of_life(
    collector: Collector, rank: Callable[..., Rank]
) -> None:
    one = rank(collector, pace=replace(PACE, heartbeat=0.1))
    by_uploader(one)
    count = len(collector.batches)
    collector.wait_for(lambda c: len(c.batches) >= count + 10)
    assert not any(batch.columns for batch in collector.batches[count + 5 :])


def test_only_steps_that_end_are_spared(collector: Collector, rank: Callable[..., Rank]) -> None:
    one = rank(collector, pace=replace(QUICK, steady_after=0.0, steady_batch=60.0))
    one.sender._going_on = True
    assert one.sender._until_next_batch(time.monotonic()) > 1
    one.sender._going_on = False
    assert one.sender._until_next_batch(time.monotonic()) == QUICK.batch
    one.train(3)
    wait_until(lambda: one.sender._going_on)
