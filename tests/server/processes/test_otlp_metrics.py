"""Metrics of running runs at a real receiver, which goes away and comes back."""

import math
import socket
import subprocess
import time

import httpx
import numpy as np
import pytest

from rankscope.server.demo.processes import RANKSCOPE
from rankscope.server.processes import otlp_metrics
from rankscope.server.processes.otlp_metrics import RunState, divergence_of, request
from rankscope.server.settings import Settings
from rankscope.server.storage.database.engine import open_engine, reading
from rankscope.server.storage.judgement import leases
from rankscope.server.window import Comparison
from tests.support.runs.fixture_run import SyntheticRun, post
from tests.support.servers.receivers import Collector, collector
from tests.support.servers.service import Service, eventually

OFTEN = {"OTEL_METRIC_EXPORT_INTERVAL": "1000"}
OTTER = SyntheticRun(run="otter", ranks=4, steps=200, desync=(2, 60), state="running", buckets=4)
HERON = SyntheticRun(run="heron", ranks=2, steps=60, state="running", project="birds")
ENDED = SyntheticRun(run="ended", ranks=1, steps=20)


def of(run, project, **more):
    about = {"rankscope.run": run, "rankscope.project": project}
    return tuple(sorted((about | {f"rankscope.{k}": v for k, v in more.items()}).items()))


def complete(receiver):
    """The newest export, once it has all that is waited for."""
    newest = receiver.exports[-1] if receiver.exports else {}
    more = {"alert.kind": "desync.gradients", "alert.severity": "critical"}
    wanted = {
        "rankscope.alerts.open": of("otter", "digits", **more),
        "rankscope.run.divergence": of("heron", "birds"),
    }
    return newest if all(w in newest.get(name, {}) for name, w in wanted.items()) else None


@pytest.mark.e2e
def test_running_runs_are_gauges_and_a_receiver_that_is_away_holds_up_nobody(tmp_path):
    receiver = Collector()
    arguments = ("--otlp", f"http://127.0.0.1:{receiver.port}")
    with Service(tmp_path, environment=OFTEN, arguments=arguments) as service:
        database = f"sqlite:///{tmp_path / 'rankscope.db'}"
        target = ("notify", "add", f"otlp://127.0.0.1:{receiver.port}", "--db", database)
        subprocess.run([*RANKSCOPE, *target], check=True, timeout=120)
        # Nobody listens yet.
        for run in (OTTER, HERON, ENDED):
            post(service.url, run)
        service.wait_for_step("otter", 199)
        eventually(lambda: _failures(service) > 0, timeout_s=60)
        assert httpx.get(f"{service.url}/readyz").status_code == 200
        receiver.come()
        try:
            found = eventually(lambda: complete(receiver), timeout_s=60)
            runs = {of("otter", "digits"), of("heron", "birds")}
            assert set(found["rankscope.run.last_step"]) == runs
            assert found["rankscope.run.last_step"][of("heron", "birds")] == 59
            losses = [HERON.values("loss", rank)[-1] for rank in range(2)]
            assert found["rankscope.run.loss"][of("heron", "birds")] == pytest.approx(
                np.mean(losses)
            )
            seconds = np.mean([HERON.values("step_seconds", rank)[-1] for rank in range(2)])
            assert found["rankscope.run.step.rate"][of("heron", "birds")] == pytest.approx(
                1 / seconds
            )
            divergence = found["rankscope.run.divergence"]
            assert divergence[of("heron", "birds")] == 0
            assert divergence[of("otter", "digits")] > 1e-4
            assert found["rankscope.runs.left_out"] == {(): 0}
            # The alert opened while nobody listened.
            [(record, about)] = eventually(lambda: receiver.records, timeout_s=60)
            assert record.event_name == "rankscope.alert.opened"
            assert about["rankscope.alert.kind"] == "desync.gradients"
            assert about["url.full"].endswith("/runs/otter")
            # It goes away, and what is posted meanwhile is there when it is back.
            receiver.go()
            before = _failures(service)
            eventually(lambda: _failures(service) > before, timeout_s=60)
            more = SyntheticRun(run="heron", ranks=2, steps=90, state="running", project="birds")
            post(service.url, more, first=60)
            receiver.come()
            eventually(
                lambda: (
                    receiver.exports[-1]["rankscope.run.last_step"].get(of("heron", "birds")) == 89
                ),
                timeout_s=60,
            )
        finally:
            receiver.go()


def _failures(service):
    lines = httpx.get(f"{service.url}/metrics").text.splitlines()
    [count] = [line for line in lines if line.startswith("rankscope_otlp_failures_total ")]
    return int(count.split()[1])


@pytest.mark.e2e
def test_a_receiver_that_never_answers_holds_up_nobody(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        arguments = ("--otlp", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with Service(tmp_path, environment=OFTEN, arguments=arguments) as service:
            post(service.url, HERON)
            connection, _ = silent.accept()
            # It is asked, and does not answer: what else a server does goes on.
            with connection:
                assert connection.recv(64).startswith(b"POST /v1/metrics")
                post(service.url, OTTER)
                found = eventually(lambda: service.alerts("otter"), timeout_s=60)
                assert found[0]["ranks"] == [2]
                began = time.monotonic()
                service.stop()
                # It is asked to end while it waits for the receiver (10 s).
                assert time.monotonic() - began < 30


def test_each_server_sends_its_own_runs_and_no_more_than_so_many(tmp_path, monkeypatch):
    monkeypatch.setattr(otlp_metrics, "_MOST_RUNS", 2)
    with collector() as receiver, Service(tmp_path, environment=OFTEN) as service:
        for number in range(3):
            run = f"run-{number}"
            one = SyntheticRun(run=run, ranks=1, steps=10, state="running", seconds_ago=60 - number)
            post(service.url, one)
            eventually(lambda run=run: service.run(run)["evaluated_step"] == 9, timeout_s=60)
        engine = open_engine(f"sqlite:///{tmp_path / 'rankscope.db'}")
        with reading(engine) as connection:
            [server] = set(leases.holders(connection, runs=[1, 2, 3]).values())
        url = f"http://127.0.0.1:{receiver.port}"
        otlp_metrics.MetricsExporter(engine, url, server="another").send()
        assert receiver.exports == []
        otlp_metrics.MetricsExporter(engine, url, server=server).send()
        engine.dispose()
    [export] = receiver.exports
    assert set(export["rankscope.run.last_step"]) == {
        of("run-2", "digits"),
        of("run-1", "digits"),
    }
    assert export["rankscope.runs.left_out"] == {(): 1}


def test_what_a_run_has_not_is_left_out_and_nan_is_a_value():
    states = [
        RunState("a", "p", 5, math.nan, None, None),
        RunState("b", "p", 5, None, 2.0, 0.5, {("loss.spike", "warning"): 2}),
    ]
    [metrics] = request(states, left_out=0, now=10.0).resource_metrics
    points = {m.name: m.gauge.data_points for m in metrics.scope_metrics[0].metrics}
    assert [len(points[f"rankscope.run.{n}"]) for n in ("loss", "step.rate", "divergence")] == [
        1
    ] * 3
    [loss] = points["rankscope.run.loss"]
    assert math.isnan(loss.as_double)
    assert loss.time_unix_nano == 10 * 10**9
    [count] = points["rankscope.alerts.open"]
    assert count.as_int == 2


@pytest.mark.parametrize(
    ("clusters", "relative", "is_it"),
    [
        ([0, 0, 0], [0, 0, 0], 0),
        ([0, 1, 2], [0, 0.1, 0.3], 0.3),
        # What no sketch shows does not hide what one shows, and is not taken for equal.
        ([0, 1, 2], [0, math.nan, 0.3], 0.3),
        ([0, 1, 0], [0, math.nan, 0], math.nan),
    ],
)
def test_the_divergence_is_that_of_the_farthest_rank(clusters, relative, is_it):
    comparison = Comparison(
        step=1,
        stage="parameters",
        ranks=np.arange(3),
        clusters=np.array(clusters),
        distance=np.array(relative, float),
        relative=np.array(relative, float),
    )
    assert divergence_of(comparison) == pytest.approx(is_it, nan_ok=True)


@pytest.mark.parametrize("url", ["collector:4318", "grpc://collector:4317", "http://"])
def test_an_endpoint_that_cannot_be_one_is_refused(url):
    with pytest.raises(ValueError, match="no endpoint of OTLP over HTTP"):
        Settings(database="sqlite://", otlp=url)


def test_an_interval_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "often")
    with pytest.raises(ValueError, match="OTEL_METRIC_EXPORT_INTERVAL='often'"):
        Settings(database="sqlite://", otlp="http://collector:4318")
