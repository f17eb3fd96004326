"""What the monitor itself does fails: starting, publishing, reporting a fault, closing."""

from __future__ import annotations

import logging
import sys
import time

import pytest
import torch

from rankscope import agent
from rankscope.agent.delivery import process_exit
from rankscope.agent.delivery.records import Records
from rankscope.agent.delivery.sender import Sender
from rankscope.agent.guard import Guard, attempt
from rankscope.agent.null_monitor import NullMonitor
from rankscope.agent.probes import Parameters
from rankscope.agent.steps.readout import Readout
from tests.support import saboteur

# Not imported: the name is that of the function, too.
attaching = sys.modules[agent.attach.__module__]

pytestmark = pytest.mark.contained

ALL = {step: step for step in range(saboteur.STEPS)}
CALLS = ["scalars", "digests", "fingerprint", "layers", "complete"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fault", [saboteur.raises, saboteur.allocates], ids=["raises", "memory"])
def test_publishing_fails_once(house, monkeypatch, call, fault):
    once = saboteur.Once(getattr(Records, call), fault, first=3)
    monkeypatch.setattr(Records, call, once)
    house.train()
    assert once.calls > 3
    house.reported_once("records", "Sabotage" if fault is saboteur.raises else "MemoryError")
    seen = house.collector.points("seen")
    assert len(seen) >= saboteur.STEPS - 1
    # The steps of this rank are still those of the others.
    assert house.collector.batches[-1].through_step == saboteur.STEPS - 1


@pytest.mark.parametrize(
    "call", ["scalars", "digests", "fingerprint", "layers", "complete", "event"]
)
def test_publishing_always_fails(house, monkeypatch, caplog, call):
    monkeypatch.setattr(Records, call, saboteur.raises)
    with caplog.at_level(logging.WARNING):
        house.train()
    if call == "event":
        # Nothing has failed but the user's mark; of that nothing can reach the server.
        assert any("records: Sabotage" in r.getMessage() for r in caplog.records)
    else:
        house.reported_once("records", "Sabotage")


def test_a_fault_that_cannot_be_reported_is_logged(house, monkeypatch, caplog):
    monkeypatch.setattr(Records, "event", saboteur.raises)
    monkeypatch.setattr(Parameters, "after_step", saboteur.raises)
    with caplog.at_level(logging.WARNING):
        house.train()
    reported = [r.getMessage() for r in caplog.records if "parameters: Sabotage" in r.getMessage()]
    assert len(reported) == 1


def test_what_cannot_be_sent_costs_only_itself():
    records = Records()
    records.scalars(0, {"loss": 1.0})
    records.scalars("no step", {"loss": 1.0})
    records.digests(0, {"parameters": object()})
    records.scalars(1, {"loss": 2.0})
    drained = records.drain()
    assert drained.rows == ((0, {"loss": 1.0}), (1, {"loss": 2.0}))
    assert records.dropped == {"unsendable": 2}
    assert records.waiting == 0


@pytest.mark.parametrize("where", ["Session", "TorchMonitor"])
def test_an_agent_that_cannot_start_is_none(house, monkeypatch, caplog, where):
    monkeypatch.setattr(attaching, where, saboteur.raises)
    with caplog.at_level(logging.WARNING):
        house.train()
    assert isinstance(house.monitors[0], NullMonitor)
    reported = [r.getMessage() for r in caplog.records]
    assert len(reported) == 1
    assert "attach: Sabotage" in reported[0]


def test_a_model_that_cannot_be_described_is_watched_all_the_same(house, monkeypatch):
    monkeypatch.setattr(attaching, "configuration", saboteur.raises)
    house.train()
    house.reported_once("configuration", "Sabotage")
    assert house.collector.points("seen") == ALL


def test_an_exit_report_that_cannot_be_prepared(house, monkeypatch):
    monkeypatch.setattr(process_exit, "add", saboteur.raises)
    house.train()
    house.reported_once("records", "Sabotage")
    assert house.collector.points("seen") == ALL


def test_a_thread_that_cannot_be_started(house, monkeypatch):
    def no_thread(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", no_thread)
        house.train()
    assert [p.suffix for p in house.spool.rglob("*-*/*.batch")]


def test_closing_fails(house, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(Sender, "close", saboteur.raises)
        with caplog.at_level(logging.WARNING):
            house.train()
    house.collector.wait_for(lambda c: len(c.points("seen")) == saboteur.STEPS)
    house.monitors[0]._connection.sender.close()
    house.reported_once("records", "Sabotage")


def test_a_device_that_never_answers_ends_with_the_run(monkeypatch):
    """What a device still computes is waited for, but not for ever."""

    class Never:
        def ready(self):
            return False

    readout = Readout()
    delivered = []
    readout.when_ready(Never(), lambda: delivered.append(1))
    began = time.monotonic()
    readout.finish(0.05)
    assert time.monotonic() - began < 1
    assert not delivered


def test_a_device_that_fails_does_not_pile_up():
    class Broken:
        def ready(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    readout = Readout()
    delivered = []
    readout.when_ready(Broken(), lambda: delivered.append("broken"))
    readout.after_all(lambda: delivered.append("after"))
    with pytest.raises(RuntimeError):
        readout.poll()
    readout.poll()
    assert delivered == ["after"]


def test_stderr_that_is_closed(house, monkeypatch):
    class Closed:
        def write(self, text):
            raise ValueError("I/O operation on closed file.")

        def flush(self):
            raise ValueError("I/O operation on closed file.")

    monkeypatch.setattr(sys, "stderr", Closed())
    house.options = {"run": None}
    house.train()
    assert house.collector.points("seen") == ALL


def test_faults_for_the_process_are_reported_by_every_monitor():
    reported = []
    guards = [Guard(lambda p, t, i=i: reported.append(i), everywhere=True) for i in range(2)]
    from rankscope.agent.guard import process_wide

    process_wide("loss")(saboteur.raises)()
    process_wide("loss")(saboteur.raises)()
    assert sorted(reported) == [0, 1]
    guards[0].retire()
    assert attempt(lambda: 3, name="three") == 3


def test_a_trainers_own_error_is_its_own(house):
    class Oops(Exception):
        pass

    def each(step):
        if step == 4:
            raise Oops("the trainer's")

    with pytest.raises(Oops):
        saboteur.train(house.attach, each=each)
    assert house.faults == []
    assert torch.is_grad_enabled()
