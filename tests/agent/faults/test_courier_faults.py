"""The process that posts for the trainer fails, in each of the ways in which a process can."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time

import pytest
from support import saboteur
from support.collector import wait_until
from support.couriers import couriers

from rankscope.agent import sender, transport
from rankscope.agent.courier import Courier

SLACK_SECONDS = 0.5

pytestmark = pytest.mark.contained

FAULTS = [saboteur.raises, saboteur.allocates]
PARTS = {"start": (transport, "Courier"), "ready": (Courier, "ready"), "post": (Courier, "post")}


@pytest.fixture(autouse=True)
def _at_once(house, monkeypatch):
    # The courier comes with the second post.
    monkeypatch.setattr(sender, "Pace", functools.partial(sender.Pace, courier_after=0.0))


def everything_arrived(house):
    assert house.collector.points("seen") == {s: s for s in range(saboteur.STEPS)}
    last = house.collector.batches[-1]
    assert (last.state, last.through_step) == ("finished", saboteur.STEPS - 1)


@pytest.mark.parametrize("fault", FAULTS, ids=["raises", "memory"])
@pytest.mark.parametrize("part", PARTS)
def test_a_courier_that_fails_costs_nothing(house, monkeypatch, part, fault):
    owner, name = PARTS[part]
    monkeypatch.setattr(owner, name, fault)
    house.train(each=lambda step: time.sleep(0.05))
    house.told_once("courier", "Sabotage" if fault is saboteur.raises else "MemoryError")
    everything_arrived(house)


def each_with_a_signal(number):
    """Trains on until the courier posts, then sends it a signal."""
    before = couriers()
    posted = []
    original = Courier.post

    def post(self, *args, **kwargs):
        reply = original(self, *args, **kwargs)
        posted.append(1)
        return reply

    def each(step):
        if step == 3:
            wait_until(lambda: len(posted) > 2)
            (pid,) = couriers() - before
            os.kill(pid, number)
        time.sleep(0.05)

    return post, each, before


def test_a_courier_that_is_killed_costs_nothing(house, monkeypatch):
    post, each, before = each_with_a_signal(signal.SIGKILL)
    monkeypatch.setattr(Courier, "post", post)
    house.train(each=each)
    house.told_once("courier", "it has ended")
    everything_arrived(house)
    assert couriers() <= before


def test_a_courier_that_stands_still_holds_nothing_up(house, monkeypatch):
    monkeypatch.setattr("rankscope.agent.courier._PATIENCE_SECONDS", 0.1)
    post, each, before = each_with_a_signal(signal.SIGSTOP)
    monkeypatch.setattr(Courier, "post", post)
    try:
        outcome = house.train(each=lambda step: each(step) or time.sleep(0.2))
    finally:
        for pid in couriers() - before:
            os.kill(pid, signal.SIGCONT)
    assert outcome.slowest_step < 1
    house.told_once("courier", "no answer of it within 1.6 s")
    everything_arrived(house)
    wait_until(lambda: couriers() <= before)


@pytest.mark.parametrize("part", PARTS)
def test_a_call_that_hangs_holds_nothing_up(house, monkeypatch, hang, part):
    owner, name = PARTS[part]
    hanging = hang(getattr(owner, name))
    monkeypatch.setattr(owner, name, hanging)
    monkeypatch.setattr("rankscope.agent.monitor._CLOSE_SECONDS", 0.8)
    outcome = house.train(each=lambda step: time.sleep(0.05))
    assert outcome.close_seconds < 0.8 + SLACK_SECONDS
    assert hanging.entered.is_set()
    assert threading.current_thread().name not in hanging.threads
