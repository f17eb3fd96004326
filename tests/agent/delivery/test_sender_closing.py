"""How a sender ends: in time, and with nothing lost that can be kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rankscope.agent.delivery.sync import sync
from tests.support.servers.collector import CLOSE, HANG, Collector, Reply, wait_until
from tests.support.servers.sending import QUICK, Rank, assert_everything_arrived


@pytest.mark.parametrize("reply", [HANG, Reply(status=503), CLOSE])
def test_closing_is_bounded_and_leaves_the_rest_to_sync(
    collector: Collector, rank: Callable[..., Rank], reply: Reply
) -> None:
    one = rank(collector, pace=replace(QUICK, read_timeout=30.0))
    one.train(20)
    collector.wait_for(lambda c: c.stored() == one.produced)
    collector.always = reply
    one.train(20)

    began = time.monotonic()
    one.sender.close(timeout=1.0)
    assert time.monotonic() - began < 1.2

    assert one.spooled_files()
    assert one.sender.counters.spooled + one.sender.counters.accepted == one.produced
    assert len(one.problems) == 1
    assert "rankscope sync" in one.problems[0]

    collector.stop()
    collector.always = None
    collector.start()
    report = sync(one.options.spool, collector.url, None)
    assert report.left == report.refused == report.damaged == 0
    assert_everything_arrived(collector, one)
    assert collector.batches[-1].state == "finished"
    assert not one.options.spool.exists() or list(one.options.spool.iterdir()) == []


def test_closing_without_a_server_is_quick(away: Collector, rank: Callable[..., Rank]) -> None:
    one = rank(away)
    one.train(20)
    began = time.monotonic()
    one.sender.close()

    assert time.monotonic() - began < 1.0
    assert len(one.problems) == 1
    assert one.sender.counters.spooled == one.produced


def test_closing_waits_for_a_server_that_is_only_busy(
    collector: Collector, rank: Callable[..., Rank]
) -> None:
    one = rank(collector)
    collector.wait_for(lambda c: len(c.batches) >= 1)
    collector.replies.extend([Reply(status=503)] * 2)
    one.train(20)
    one.sender.close()

    assert_everything_arrived(collector, one)
    assert collector.batches[-1].state == "finished"


def test_closing_waits_for_a_server_that_is_being_restarted(
    collector: Collector, rank: Callable[..., Rank]
) -> None:
    one = rank(collector)
    # What was heard of the server counts: cut off before its answer, it never was there.
    wait_until(lambda: one.sender.counters.posts >= 1)
    collector.stop()
    one.train(20)
    wait_until(lambda: bool(one.problems))
    closing = threading.Thread(target=one.sender.close)
    closing.start()
    # Not for the spool: what is made while closing is written there when the time is over.
    failures = one.sender.counters.failures
    wait_until(lambda: one.sender.counters.failures >= failures + 3)
    collector.start()
    closing.join()

    assert_everything_arrived(collector, one)
    assert collector.batches[-1].state == "finished"
    assert one.spooled_files() == []


def test_closing_again_does_nothing(collector: Collector, rank: Callable[..., Rank]) -> None:
    one = rank(collector)
    one.train(5)
    threads = [threading.Thread(target=one.sender.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one.sender.close("failed", "too late")
    one.train(5)

    assert [b.state for b in collector.batches].count("finished") == 1
    assert collector.batches[-1].state == "finished"
    assert one.sender.counters.dropped == {"closed": 15}
    assert one.accounted() == one.produced


def test_closing_from_the_senders_own_thread(away: Collector, rank: Callable[..., Rank]) -> None:
    holder: list[Rank] = []
    one = rank(away, on_problem=lambda text: holder[0].sender.close())
    holder.append(one)
    one.train(5)

    wait_until(lambda: len(one.spooled_files()) > 0 and one.sender.counters.spooled == 15)
    assert one.accounted() == one.produced
    one.sender.close()  # waits for that thread
    away.start()
    sync(one.options.spool, away.url, None)
    assert_everything_arrived(away, one)
    assert away.batches[-1].state == "finished"


def test_a_sender_that_never_started_leaves_all_to_sync(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    one = Rank("http://127.0.0.1:9", tmp_path / "spool")
    one.train(5)
    one.sender.close()

    assert one.sender.counters.spooled == one.produced
    one.sender.start()  # too late, and harmless
    assert set(threading.enumerate()) <= before


def test_a_spool_that_cannot_be_written_is_reported(
    away: Collector, rank: Callable[..., Rank], tmp_path: Path
) -> None:
    (tmp_path / "spool").write_text("a file")
    one = rank(away)
    one.train(5)
    one.sender.close()

    assert one.sender.counters.dropped == {"spool_failed": 15}
    assert any("cannot be written" in problem for problem in one.problems)
