"""What is left to the uploader: the answer is read with the next batch, unless it says something.

Waking up for an answer would lengthen another step of the training.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rankscope.agent import wire
from rankscope.agent.delivery.outcome import Accepted, Away
from rankscope.agent.delivery.uploader import Uploader
from tests.support.servers.collector import Collector, Reply, wait_until
from tests.support.servers.sending import BODY, QUICK, Posting, Rank, assert_everything_arrived
from tests.support.servers.uploaders import uploaders

# The uploader has the lowest priority: on a busy machine it may take seconds to answer.
LONG_SECONDS = 30.0


def started(collector: Collector, spool: Path, **given: object) -> Posting:
    """A delivery whose uploader has posted and was answered the same twice."""
    made = Posting(collector.url, spool, read_timeout=LONG_SECONDS, uploader_after=0.0, **given)
    wait_until(lambda: isinstance(made.post(), Accepted) and made.by_uploader)
    for _ in range(2):
        assert isinstance(made.post(), Accepted)
    made.delivery.listen(0.01)
    return made


@pytest.fixture
def posting(collector: Collector, tmp_path: Path) -> Iterator[Posting]:
    made = started(collector, tmp_path / "spool")
    yield made
    made.close()


def leave(posting: Posting, points: int = 0) -> bool:
    """Delivers what waits, or else a batch; whether it was left to the uploader."""
    if not posting.queue:
        posting.put(points=points)
    posting.delivery.run(math.inf)
    return posting.delivery.left


def listened(posting: Posting, seconds: float = LONG_SECONDS) -> float:
    began = time.monotonic()
    posting.delivery.listen(seconds)
    return time.monotonic() - began


def settled(posting: Posting) -> bool:
    """Reads the answer, if it is there; whether it was."""
    posting.delivery.settle()
    return not posting.delivery.left


def signalled(number: signal.Signals, pids: set[int]) -> set[int]:
    """Sends processes a signal; one of an earlier test may just be ending."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return pids


def test_nothing_is_left_to_an_uploader_that_was_not_seen_to_post(
    collector: Collector, tmp_path: Path
) -> None:
    one = Posting(collector.url, tmp_path / "spool")
    for number in (1, 2):
        assert not leave(one)
        assert collector.requests == number
        assert not one.queue
    one.close()


def test_an_answer_that_says_what_the_last_one_said_is_not_heard(
    collector: Collector, posting: Posting
) -> None:
    seen = collector.requests
    assert leave(posting)
    collector.wait_for(lambda c: c.requests == seen + 1)
    assert listened(posting, 0.5) >= 0.5
    wait_until(lambda: settled(posting))
    assert not posting.queue
    assert collector.requests == seen + 1


@pytest.mark.parametrize(
    ("answer", "follows"),
    [({"dense_until": 70}, ("dense_until", 70)), ({"hello_wanted": True}, ("hello_wanted", True))],
    ids=["dense", "hello"],
)
def test_an_answer_that_says_more_is_heard_at_once(
    collector: Collector,
    posting: Posting,
    answer: dict[str, object],
    follows: tuple[str, object],
) -> None:
    posting.delivery.hello_wanted = False
    collector.answer = answer
    assert leave(posting)
    assert listened(posting) < LONG_SECONDS
    assert settled(posting)
    name, value = follows
    assert getattr(posting.delivery, name) == value

    # Said again it is nothing new; said no more, it is.
    seen = collector.requests
    assert leave(posting)
    collector.wait_for(lambda c: c.requests == seen + 1)
    assert listened(posting, 0.5) >= 0.5
    wait_until(lambda: settled(posting))
    collector.answer = {}
    assert leave(posting)
    assert listened(posting) < LONG_SECONDS
    assert settled(posting)
    assert not posting.queue


def test_a_failure_is_heard_at_once_each_time(collector: Collector, posting: Posting) -> None:
    collector.always = Reply(status=503)
    for stopped in (False, False, True):
        if stopped:
            collector.stop()
        assert leave(posting)
        assert listened(posting) < LONG_SECONDS
        assert settled(posting)
        assert posting.delivery.away
        assert len(posting.queue) == 1


def test_a_wake_up_socket_that_nobody_reads_does_not_stop_the_uploader(
    collector: Collector, posting: Posting
) -> None:
    collector.always = Reply(status=503)
    # A socket has room for fewer: some hundred writes of a byte.
    for _ in range(1000):
        assert isinstance(posting.post(), Away)
    collector.always = None
    assert isinstance(posting.post(), Accepted)
    assert posting.by_uploader
    assert posting.reasons == []


def test_there_is_no_outcome_before_the_answer(collector: Collector, posting: Posting) -> None:
    collector.held = threading.Event()
    assert leave(posting)
    assert not settled(posting)
    assert len(posting.queue) == 1
    collector.held.set()
    wait_until(lambda: settled(posting))
    assert not posting.queue


def test_an_answer_that_never_comes(posting: Posting, monkeypatch: pytest.MonkeyPatch) -> None:
    # Together with the time that a request may take: a fifth of a second.
    patience = 0.2 - LONG_SECONDS - 1.0
    monkeypatch.setattr("rankscope.agent.delivery.uploader._PATIENCE_SECONDS", patience)
    stopped = signalled(signal.SIGSTOP, uploaders(os.getpid()))
    try:
        assert leave(posting)
        wait_until(lambda: settled(posting))
    finally:
        signalled(signal.SIGCONT, stopped)
    assert [why[:20] for why in posting.reasons] == ["no answer of it with"]
    assert len(posting.queue) == 1
    assert isinstance(posting.post(), Accepted)


def test_one_that_is_killed_is_heard_and_lost(posting: Posting) -> None:
    signalled(signal.SIGKILL, uploaders(os.getpid()))
    if leave(posting):
        assert listened(posting) < LONG_SECONDS
        wait_until(lambda: settled(posting))
    assert [why.split(" (")[0] for why in posting.reasons] == ["it has ended"]
    assert not posting.by_uploader
    assert isinstance(posting.post(), Accepted)


def test_listening_can_be_interrupted(collector: Collector, posting: Posting) -> None:
    collector.held = threading.Event()
    assert leave(posting)
    threading.Timer(0.2, posting.delivery.interrupt).start()
    assert listened(posting) < LONG_SECONDS


def test_an_answer_that_was_there_before_the_interruption_is_not_lost(
    collector: Collector, posting: Posting
) -> None:
    collector.answer = {"dense_until": 70}  # so that it is heard when it is there
    assert leave(posting)
    assert listened(posting) < LONG_SECONDS
    posting.delivery.interrupt()
    assert settled(posting)
    assert posting.delivery.dense_until == 70
    assert not posting.queue


def test_a_batch_that_was_given_up_while_it_was_posted_is_counted_once(
    collector: Collector, tmp_path: Path
) -> None:
    column = wire.Column(np.arange(600), np.random.default_rng(0).standard_normal(600))
    large = wire.encode(wire.Batch(run="r", rank=0, seq=1, columns={"loss": column}))
    # On disk there is room for the large one alone.
    room = {"memory_bytes": 1000, "disk_bytes": len(large) + len(BODY) // 2}
    one = started(collector, tmp_path / "spool", bounds=room)
    collector.held = threading.Event()
    assert leave(one, points=3)
    one.queue.put(1, large, points=600, hello=False)
    assert one.lost == {"spool_full": 3}
    collector.held.set()
    wait_until(lambda: settled(one))
    assert one.delivery.counters({}).accepted == 0
    assert isinstance(one.post(), Accepted)
    assert one.delivery.counters({}).accepted == 600
    one.close()


def test_a_fault_in_what_follows_from_an_answer_does_not_cost_the_uploader(
    collector: Collector, posting: Posting, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector.always = Reply(status=422)

    def full(*given: object) -> None:
        raise MemoryError

    assert leave(posting)
    assert listened(posting) < LONG_SECONDS
    with monkeypatch.context() as changed:
        changed.setattr(posting, "lose", full)
        with pytest.raises(MemoryError):
            posting.delivery.settle()
    assert not posting.delivery.left
    collector.always = None
    assert isinstance(posting.post(), Accepted)
    assert posting.by_uploader


# -------------------------------------------------------------------------------------- in a sender


PACE = replace(QUICK, read_timeout=LONG_SECONDS, heartbeat=60.0, uploader_after=0.0)


def by_uploader(collector: Collector, one: Rank) -> None:
    """Has the uploader post: its connection is the second."""
    wait_until(lambda: one.train(1) or collector.connections >= 2)
    wait_until(lambda: one.sender.counters.waiting == 0)


def left_for_long(
    collector: Collector, rank: Callable[..., Rank], **answer: int
) -> tuple[Rank, threading.Event]:
    """A rank of which one post is left, its answer held until the event is set.

    No other batch comes for half an hour. The answer says what is given besides the usual.
    """
    # As long as no step ends, batches are made at the usual pace: signs of life.
    pace = replace(PACE, heartbeat=0.05, steady_after=0.0, steady_batch=3600.0)
    one = rank(collector, pace=pace)
    collector.wait_for(lambda c: c.connections >= 2 and c.requests >= 5)
    collector.answer = answer
    collector.held = held = threading.Event()
    one.train(1)
    wait_until(lambda: one.sender._next_batch > time.monotonic() + 60)
    collector.wait_for(lambda c: len(c.points("loss")) == 1)
    return one, held


def test_batches_are_left_to_the_uploader_one_at_a_time(
    collector: Collector, rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rank(collector, pace=PACE)
    by_uploader(collector, one)
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
    assert_everything_arrived(collector, one)
    assert collector.duplicates == 0


def test_a_dense_sampling_request_is_heard_before_the_next_batch(
    collector: Collector, rank: Callable[..., Rank]
) -> None:
    one, held = left_for_long(collector, rank, dense_until=10**6)
    assert one.sender.dense_until is None
    held.set()
    wait_until(lambda: one.sender.dense_until == 10**6)


def answered(one: Rank) -> None:
    """Waits until the answer lies there, without reading it."""
    supervisor = one.sender._delivery.uploader
    assert supervisor is not None
    assert supervisor._uploader is not None
    readable, _, _ = select.select([supervisor._uploader._socket], [], [], LONG_SECONDS)
    assert readable


def test_closing_with_an_answer_that_is_there_posts_nothing_twice(
    collector: Collector, rank: Callable[..., Rank]
) -> None:
    one, held = left_for_long(collector, rank)
    held.set()
    answered(one)
    one.sender.close()
    assert_everything_arrived(collector, one)
    assert collector.duplicates == 0
    assert collector.batches[-1].state == "finished"


def test_closing_while_the_answer_is_out_loses_nothing(
    collector: Collector, rank: Callable[..., Rank]
) -> None:
    one, held = left_for_long(collector, rank)
    collector.held = None
    one.sender.close()
    held.set()
    assert_everything_arrived(collector, one)
    assert collector.duplicates == 1
    assert one.problems == []


def test_an_idle_rank_goes_on_giving_signs_of_life(
    collector: Collector, rank: Callable[..., Rank]
) -> None:
    one = rank(collector, pace=replace(PACE, heartbeat=0.1))
    by_uploader(collector, one)
    count = len(collector.batches)
    collector.wait_for(lambda c: len(c.batches) >= count + 10)
    assert not any(batch.columns for batch in collector.batches[count + 5 :])


def test_only_steps_that_end_are_spared(collector: Collector, rank: Callable[..., Rank]) -> None:
    one = rank(collector, pace=replace(QUICK, steady_after=0.0, steady_batch=60.0))
    collector.wait_for(lambda c: c.requests >= 5)
    assert one.sender._next_batch < time.monotonic() + 1
    one.train(3)
    wait_until(lambda: one.sender._next_batch > time.monotonic() + 1)
    # None ended since then; but that is known with the next batch alone.
    assert one.sender.counters.accepted == one.produced
