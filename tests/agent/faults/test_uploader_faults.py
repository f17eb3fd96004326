"""The process that posts for the trainer fails, in each of the ways in which a process can."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time

import pytest

from rankscope.agent.delivery import sender, uploader
from rankscope.agent.delivery.uploader import Uploader
from tests.support import saboteur
from tests.support.servers.collector import wait_until
from tests.support.servers.uploaders import uploaders

SLACK_SECONDS = 0.5

pytestmark = pytest.mark.contained

FAULTS = [saboteur.raises, saboteur.allocates]
PARTS = {"start": (uploader, "Uploader")} | {
    name: (Uploader, name) for name in ("ready", "post", "send", "answer", "listen")
}


@pytest.fixture(autouse=True)
def _at_once(house, monkeypatch):
    # The uploader comes with the second post.
    monkeypatch.setattr(sender, "Pace", functools.partial(sender.Pace, uploader_after=0.0))


def assert_everything_arrived(house):
    assert house.collector.points("seen") == {s: s for s in range(saboteur.STEPS)}
    last = house.collector.batches[-1]
    assert (last.state, last.through_step) == ("finished", saboteur.STEPS - 1)


@pytest.mark.parametrize("fault", FAULTS, ids=["raises", "memory"])
@pytest.mark.parametrize("part", PARTS)
def test_an_uploader_that_fails_costs_nothing(house, monkeypatch, part, fault):
    owner, name = PARTS[part]
    monkeypatch.setattr(owner, name, fault)
    house.train(each=lambda step: time.sleep(0.05))
    house.reported_once("uploader", "Sabotage" if fault is saboteur.raises else "MemoryError")
    assert_everything_arrived(house)


def noted_once(house, fragment):
    """It is no fault of the agent's, but it is to be seen."""
    assert house.faults == []
    events = [event for batch in house.collector.batches for event in batch.events]
    (note,) = [e for e in events if e.kind == "agent.note" and "uploader" in e.text]
    assert fragment in note.text


def each_with_a_signal(number):
    """Trains on until the uploader posts, then sends it a signal."""
    before = uploaders()
    posted = []
    original = Uploader.send

    def send(self, *args, **kwargs):
        original(self, *args, **kwargs)
        posted.append(1)

    def each(step):
        if step == 3:
            wait_until(lambda: len(posted) > 2)
            (pid,) = uploaders(os.getpid()) - before
            os.kill(pid, number)
        time.sleep(0.05)

    return send, each, before


def test_an_uploader_that_is_killed_costs_nothing(house, monkeypatch):
    send, each, before = each_with_a_signal(signal.SIGKILL)
    monkeypatch.setattr(Uploader, "send", send)
    house.train(each=each)
    noted_once(house, "it has ended")
    assert_everything_arrived(house)
    assert uploaders(os.getpid()) <= before


@pytest.mark.alone
def test_an_uploader_that_stands_still_holds_nothing_up(house, monkeypatch):
    monkeypatch.setattr("rankscope.agent.delivery.uploader._PATIENCE_SECONDS", 0.1)
    send, each, before = each_with_a_signal(signal.SIGSTOP)
    monkeypatch.setattr(Uploader, "send", send)
    try:
        outcome = house.train(each=lambda step: each(step) or time.sleep(0.2))
    finally:
        for pid in uploaders(os.getpid()) - before:
            os.kill(pid, signal.SIGCONT)
    assert outcome.slowest_step < 1
    noted_once(house, "no answer of it within 1.6 s")
    assert_everything_arrived(house)
    wait_until(lambda: uploaders(os.getpid()) <= before)


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
