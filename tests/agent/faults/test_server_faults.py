"""The far end is gone, hangs, or answers nonsense."""

from __future__ import annotations

import logging
import threading
import time
import tracemalloc

import pytest
import torch
from torch import nn

from rankscope.agent.delivery.outcome import Away
from rankscope.agent.delivery.spool import folders_below
from rankscope.agent.delivery.sync import sync
from tests.support import saboteur
from tests.support.servers.collector import HANG, Collector, wait_until


@pytest.mark.alone
@pytest.mark.parametrize("behave", saboteur.BAD, ids=[b.__name__ for b in saboteur.BAD])
def test_training_goes_on_and_the_rest_waits_in_the_spool(house, caplog, behave):
    with saboteur.BadServer(behave) as server, caplog.at_level(logging.WARNING):
        house.options = {"server": server.url}
        outcome = house.train(each=lambda step: time.sleep(0.01))
        assert server.connections
    assert outcome.slowest_step < 1
    # A person gets one message; with a server that hangs until the end, that something is left.
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
    # Nothing is lost: a server of our own gets it all.
    sync(house.spool, house.collector.url, None)
    assert house.collector.points("seen") == {s: s for s in range(saboteur.STEPS)}
    assert house.collector.batches[-1].state == "finished"
    assert len(house.faults) <= 1
    assert all(f.text.startswith("server: ") for f in house.faults)


@pytest.mark.parametrize("behave", [saboteur.drips, saboteur.drips_body, saboteur.is_silent])
def test_an_answer_takes_as_long_as_it_may_and_no_longer(behave, deliver_to):
    with saboteur.BadServer(behave) as server:
        posting = deliver_to(server.url, read_timeout=0.3)
        began = time.monotonic()
        outcome = posting.post()
        assert time.monotonic() - began < 1.0
        assert isinstance(outcome, Away)
        assert "no answer within 0.3 s" in outcome.why
        posting.close()


def test_a_server_that_was_away_gets_a_report_of_it(house, collector):
    collector.stop()

    def each(step):
        if step == 2:
            sender = house.monitors[-1]._connection.sender
            wait_until(lambda: sender.counters.failures >= 4)
            collector.start()
            collector.wait_for(lambda c: len(c.points("seen")) >= 2)

    house.train(each=each)
    house.reported_once("server", "no connection")
    assert collector.points("seen") == {s: s for s in range(saboteur.STEPS)}


@pytest.mark.parametrize("proxy", ["socks9://127.0.0.1:1", "://", "nonsense"])
@pytest.mark.contained
def test_a_proxy_that_is_none(house, monkeypatch, proxy):
    monkeypatch.setenv("http_proxy", proxy)
    monkeypatch.setattr("rankscope.agent.delivery.address._is_loopback", lambda host: False)
    house.train()
    monkeypatch.delenv("http_proxy")
    sync(house.spool, house.collector.url, None)
    assert house.collector.points("seen") == {s: s for s in range(saboteur.STEPS)}
    assert len(house.faults) == 1


def own_threads():
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("rankscope"))


@pytest.mark.parametrize("gone", [True, False], ids=["gone", "hanging"])
def test_memory_does_not_grow(house, collector: Collector, gone):
    if gone:
        collector.stop()
    else:
        collector.always = HANG
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = house.attach(model, optimizer)
    x = torch.randn(4, 4)
    threads = own_threads()

    def steps(number):
        for step in range(number):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            monitor.log(seen=step)

    steps(1500)
    tracemalloc.start()
    try:
        # From one moment at which all has been written away to the next.
        sender = monitor._connection.sender
        wait_until(lambda: monitor._records.waiting < 100)
        before = tracemalloc.get_traced_memory()[0]
        steps(5000)
        wait_until(lambda: monitor._records.waiting < 100)
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert own_threads() == threads
    # 5,000 steps make some 60,000 numbers, which would be 6 MB.
    assert after - before < 2 * 2**20, after - before
    monitor.close()
    assert sender.counters.dropped == {}
    assert folders_below(house.spool)
