"""`monitor.verdict()` and `monitor.on_alert(...)`: what the server finds reaches the trainer."""

import contextlib
import logging
import threading
import time

import pytest
import torch

from rankscope import agent
from tests.support.servers.service import Service, eventually


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(autouse=True)
def spool(monkeypatch, tmp_path):
    monkeypatch.setenv("RANKSCOPE_SPOOL", str(tmp_path / "spool"))


def broken(monitor, until):
    """Trains by hand on a loss that is none from step 20 on, until something is so."""
    deadline = time.monotonic() + 120
    step = 0
    while not until():
        assert time.monotonic() < deadline
        monitor.step(loss=float("nan") if step >= 20 else 1.0 / (step + 1))
        step += 1
        time.sleep(0.02)


@pytest.mark.e2e
def test_a_verdict_and_alerts_reach_the_trainer_while_it_trains(service):
    heard, grave, threads = [], [], set()

    def listen(alert):
        heard.append(alert)
        threads.add(threading.current_thread())

    with agent.start(run="sick", server=service.url) as monitor:
        began = time.monotonic()
        assert monitor.verdict() is None
        monitor.on_alert(listen)
        monitor.on_alert(grave.append, severity="critical")
        # Nothing of this waits for anybody.
        assert time.monotonic() - began < 2.0
        broken(monitor, lambda: heard and monitor.verdict().so_far == "fail")
        verdict = monitor.verdict()
    assert heard[0]["kind"] == "loss.nonfinite"
    assert (heard[0]["severity"], heard[0]["first_step"]) == ("critical", 20)
    assert any("loss.nonfinite" in reason for reason in verdict.reasons)
    assert abs(verdict.at - time.time()) < 60
    # Each once, although it was asked several times; and never by the training's own thread.
    ids = [alert["id"] for alert in heard]
    assert len(ids) == len(set(ids))
    assert [alert["id"] for alert in grave] == [
        a["id"] for a in heard if a["severity"] == "critical"
    ]
    assert threading.main_thread() not in threads


@pytest.mark.e2e
@pytest.mark.contained
def test_what_a_callback_raises_goes_no_further(service):
    heard = []

    def fails(alert):
        raise RuntimeError("the trainer's own fault")

    with agent.start(run="careless", server=service.url) as monitor:
        monitor.on_alert(fails)
        monitor.on_alert(heard.append)
        broken(monitor, lambda: heard)
    events = eventually(
        lambda: [e for e in service.get("/runs/careless")["events"] if e["kind"] == "agent.fault"],
        timeout_s=30,
    )
    assert "on_alert: " in events[0]["text"]
    assert "the trainer's own fault" in events[0]["text"]


def test_a_server_that_is_away_is_said_once_and_waited_for_by_nobody(caplog):
    with caplog.at_level(logging.WARNING, "rankscope"):
        with agent.start(run="alone", server="http://127.0.0.1:9", spool=None) as monitor:
            assert monitor.verdict() is None
            said = eventually(
                lambda: [r for r in caplog.records if "how the run is judged" in r.message],
                timeout_s=30,
            )
            assert monitor.verdict() is None
    assert len(said) == 1


def test_many_monitors_ask_in_one_thread_which_ends_with_the_last():
    def threads():
        return [t for t in threading.enumerate() if t.name == "rankscope-judgement"]

    with contextlib.ExitStack() as monitors:
        for number in range(8):
            server = f"http://127.0.0.1:{number + 1}"
            monitor = agent.start(run=f"run{number}", server=server, spool=None)
            monitors.enter_context(monitor).on_alert(lambda alert: None)
        assert len(threads()) == 1
    assert eventually(lambda: not threads(), timeout_s=60)


@pytest.mark.e2e
def test_a_second_monitor_hears_of_its_own_run_alone(service):
    heard = {"sick": [], "well": []}
    with (
        agent.start(run="well", server=service.url) as well,
        agent.start(run="second", server=service.url) as sick,
    ):
        well.on_alert(heard["well"].append)
        sick.on_alert(heard["sick"].append)
        broken(sick, lambda: heard["sick"])
        well.step(loss=1.0)
    assert {alert["run"] for alert in heard["sick"]} == {"second"}
    assert heard["well"] == []


def test_nobody_who_does_not_ask_has_a_thread_for_it(service):
    model = torch.nn.Linear(2, 1)
    with agent.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), server=service.url):
        assert not [t for t in threading.enumerate() if t.name == "rankscope-judgement"]


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_where_no_server_is_asked_nothing_is_known(mode):
    with agent.start(run="r", mode=mode) as monitor:
        monitor.on_alert(lambda alert: None)
        assert monitor.verdict() is None
        assert not [t for t in threading.enumerate() if t.name == "rankscope-judgement"]


@pytest.mark.contained
def test_a_severity_that_is_none_is_reported_and_does_not_stop_the_training(service):
    with agent.start(run="typo", server=service.url) as monitor:
        monitor.on_alert(lambda alert: None, severity="grave")
        monitor.step(loss=1.0)

    def faults():
        found = service.run("typo")
        return found and [e["text"] for e in found["events"] if e["kind"] == "agent.fault"]

    [text] = eventually(faults, timeout_s=60)
    assert "severity is one of info, warning, critical, not 'grave'" in text
