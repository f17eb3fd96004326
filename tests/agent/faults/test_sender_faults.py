"""Each part of what runs beside the training thread fails, and the training goes on.

Which thread runs what:

- the training thread: the probes, their hooks, `Records`, and at the end `close`, which
  waits for the others for 5 s at most. A probe that hangs there can be cured by nobody; so nothing
  there waits for a lock, a socket or a file (`test_threads.py`).
- `rankscope-sender`: draining, `prepare`, `hello`, `phase`, encoding, the requests, the spool.
- `rankscope-tensorboard`: the event file, nothing else.
- `rankscope-signals`: exit report, where a SIGTERM arrives.
- `rankscope-last`: what is left to do at `close` where the sender hangs.
"""

from __future__ import annotations

import logging
import threading
import time

import pytest

from rankscope.agent import wire
from rankscope.agent.delivery import sender, session, tensorboard
from rankscope.agent.delivery.batches import BatchMaker
from rankscope.agent.delivery.deliver import Delivery
from rankscope.agent.delivery.http import HttpClient
from rankscope.agent.delivery.queue import BatchQueue
from rankscope.agent.delivery.records import Records
from rankscope.agent.monitor import Monitor
from tests.support import saboteur
from tests.support.servers.collector import wait_until

SLACK_SECONDS = 0.5

pytestmark = pytest.mark.contained

FAULTS = [saboteur.raises, saboteur.allocates]
# What is replaced, and whose fault it is then.
PARTS = {
    "drain": (Records, "drain", "sender"),
    "put": (BatchMaker, "_put", "sender"),
    "encode": (wire, "encode", "encoder"),
    "queue": (BatchQueue, "put", "sender"),
    "adopt": (sender, "folders_of_rank", "adopt"),
    "hello": (session, "replace", "hello"),
    "phase": (Monitor, "phase", "phase"),
    "run": (Delivery, "run", "sender"),
    "post": (HttpClient, "post", "sender"),
    "conclude": (Delivery, "_conclude", "sender"),
    "tensorboard": (tensorboard.EventWriter, "write", "tensorboard"),
    "tensorboard opens": (tensorboard.EventWriter, "__init__", "tensorboard"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=["raises", "memory"])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_fails_once_costs_little(house, monkeypatch, tmp_path, part, fault):
    owner, name, reported = PARTS[part]
    original = getattr(owner, name)
    once = saboteur.Once(original.fget if isinstance(original, property) else original, fault)
    replaced = property(lambda self: once(self)) if isinstance(original, property) else once
    monkeypatch.setattr(owner, name, replaced)
    house.options = {"tensorboard": tmp_path / "events"}

    def each(step: int) -> None:
        # However busy the machine is, little is in hand when it fails.
        if step == 2:
            wait_until(lambda: once.calls)
        # Time for some rounds: what fails once is to be made good in the next.
        time.sleep(0.02)

    house.train(each=each)
    assert once.calls
    house.reported_once(reported, "Sabotage" if fault is saboteur.raises else "MemoryError")
    last = house.collector.batches[-1]
    assert (last.state, last.through_step) == ("finished", saboteur.STEPS - 1)
    assert any(batch.hello is not None for batch in house.collector.batches) or part == "drain"
    # What was in hand when it failed may be lost, and no more than that.
    seen = house.collector.points("seen")
    assert all(seen[step] == step for step in seen)
    assert len(seen) >= saboteur.STEPS - 7, seen


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_always_fails_is_reported_in_the_log_at_least(
    house, monkeypatch, tmp_path, caplog, part
):
    owner, name, reported = PARTS[part]
    if isinstance(getattr(owner, name), property):
        monkeypatch.setattr(owner, name, property(saboteur.raises))
    else:
        monkeypatch.setattr(owner, name, saboteur.raises)
    house.options = {"tensorboard": tmp_path / "events"}
    with caplog.at_level(logging.WARNING):
        house.train()
    warned = [r.getMessage() for r in caplog.records if "Sabotage" in r.getMessage()]
    assert len(warned) == 1, warned
    assert f" {reported}: Sabotage" in warned[0]
    if part in ("adopt", "hello", "phase") or part.startswith("tensorboard"):
        house.reported_once(reported, "Sabotage")
        assert house.collector.points("seen") == {s: s for s in range(saboteur.STEPS)}


@pytest.mark.parametrize("part", [p for p in PARTS if p != "phase"])
def test_a_part_that_hangs_holds_nothing_up(house, monkeypatch, tmp_path, hang, part):
    owner, name, _ = PARTS[part]
    hanging = hang(getattr(owner, name))
    monkeypatch.setattr(owner, name, hanging)
    house.options = {"tensorboard": tmp_path / "events"}
    monkeypatch.setattr(tensorboard, "_CLOSE_SECONDS", 0.2)
    monkeypatch.setattr("rankscope.agent.monitor._CLOSE_SECONDS", 0.8)
    outcome = house.train(each=lambda step: time.sleep(0.02))
    assert outcome.close_seconds < 0.8 + SLACK_SECONDS
    assert hanging.entered.is_set()
    assert threading.current_thread().name not in hanging.threads
    if part.startswith("tensorboard"):
        house.reported_once("tensorboard", "TimeoutError")
        assert house.collector.points("seen") == {s: s for s in range(saboteur.STEPS)}
