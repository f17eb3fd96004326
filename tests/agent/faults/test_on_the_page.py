"""End to end: a fault of the agent stands on the run's page, once."""

from __future__ import annotations

import functools
import time

import pytest

from rankscope import agent
from rankscope.agent import wire
from rankscope.agent.delivery.tensorboard import EventWriter
from rankscope.agent.probes import Parameters
from tests.support import saboteur
from tests.support.servers.service import Service, eventually

pytestmark = pytest.mark.contained


def test_the_server_shows_each_fault_once(tmp_path, monkeypatch, alone):
    monkeypatch.setattr(Parameters, "after_step", saboteur.raises)
    monkeypatch.setattr(wire, "encode", saboteur.Once(wire.encode, saboteur.allocates))
    monkeypatch.setattr(EventWriter, "write", saboteur.raises)
    with Service(tmp_path / "server") as service:
        attach = functools.partial(
            agent.attach,
            server=service.url,
            run="run",
            spool=tmp_path / "spool",
            tensorboard=tmp_path / "events",
        )
        outcome = saboteur.train(attach, each=lambda step: time.sleep(0.1))
        assert outcome.digest == alone
        service.wait_for_state("run", "finished")
        faults = eventually(
            lambda: (found := service.run("run")["agent"]["faults"]) and len(found) >= 3 and found,
            timeout_s=20,
        )
    texts = sorted(str(fault) for fault in faults)
    assert len(texts) == 3, texts
    for text, (part, fragment) in zip(
        sorted(fault["text"] for fault in faults),
        [("encoder", "MemoryError"), ("parameters", "Sabotage"), ("tensorboard", "Sabotage")],
        strict=True,
    ):
        assert text.startswith(f"{part}: ")
        assert fragment in text
