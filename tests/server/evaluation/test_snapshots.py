"""An evaluation that goes on elsewhere ends in the same alerts, to the last bit."""

import pickle
import subprocess
import threading
import zlib
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select, update

from rankscope.server.alerts.lifecycle import fold
from rankscope.server.detectors import build
from rankscope.server.detectors.runner import Evaluation
from rankscope.server.evaluation import run as run_evaluation
from rankscope.server.evaluation import snapshot
from rankscope.server.evaluation.worker import Worker
from rankscope.server.storage import schema
from rankscope.server.storage.database import migrate
from rankscope.server.storage.database.engine import open_engine, reading, writing
from rankscope.server.storage.ingest.batches import store_batch
from tests.support.judging import judge
from tests.support.runs.beside import beside
from tests.support.runs.chain import chain
from tests.support.runs.fixture_run import SyntheticRun
from tests.support.runs.replicas import apart
from tests.support.runs.scenarios import TRACES, recorded

RECORDED = [path.stem for path in sorted(TRACES.glob("*.npz"))]
DIVERGENT = ["none", "start", "bitflip", "skipped", "rate", "drift", "step-skipped", "none+own"]
CHAIN = ["none", "sum", "swapped", "accumulating", "one-clips", "pair-duplicated", "same-order"]
CHAIN += ["restart-replays", "overlap", "frozen", "skips", "nonfinite", "other-commit"]
CHAIN += ["holds-others", "same-rng", "ended-schedule"]
BESIDE = ["beside 0.0", "beside 0.2"]


@cache
def scenario(name):
    if name in RECORDED:
        return recorded(0, trace=name)
    if name.startswith("beside "):
        return beside(0, worse=float(name.removeprefix("beside ")), metric="grad_norm", factor=9.0)
    if name.startswith("chain "):
        return chain(0, fault=name.removeprefix("chain "))
    fault, _, buffers = name.partition("+")
    return apart(0, fault=fault, buffers=buffers)


@cache
def whole(name):
    return judge(scenario(name), build())


@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    name=st.sampled_from(RECORDED + DIVERGENT + BESIDE + [f"chain {fault}" for fault in CHAIN]),
    cuts=st.lists(st.integers(0, 700), max_size=6),
)
def test_detectors_go_on_from_a_snapshot(name, cuts):
    evaluation, alerts, checks = Evaluation(build(), strict=True), {}, {}
    for window in scenario(name).windows(cuts):
        findings, checks = evaluation.advance(window)
        known = tuple(alerts.values())
        folded = fold(known, findings, run="run", through_step=window.last_step, now=0.0)
        alerts |= {alert.id: alert for alert in folded.alerts}
        evaluation, alerts = snapshot.from_bytes(snapshot.to_bytes((evaluation, alerts)))
    ordered = sorted(alerts.values(), key=lambda a: (a.seen_step, a.id))
    # As text, since NaN is not equal to itself.
    assert [repr(a) for a in ordered] == [repr(a) for a in whole(name).alerts]
    assert checks == whole(name).checks


RUNS = [
    SyntheticRun(run="apart", ranks=2, steps=160, desync=(1, 50), spike=(0, 110), told=True),
    SyntheticRun(run="broken", ranks=2, steps=160, nan=(1, 60), state="failed"),
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Databases that have no run yet; one for each call."""
    folder = tmp_path_factory.mktemp("databases")
    made = []

    def make():
        engine = open_engine(f"sqlite:///{folder / f'{len(made)}.db'}")
        migrate.upgrade(engine)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.dispose()


def evaluated(engine, runs, ends):
    """What is stored of runs; `ends` says after which batch the server ends, and how."""
    time = [1000.0]

    def start():
        return Worker(engine, threading.Event(), now=lambda: time[0], strict=True)

    worker = start()
    turns = zip(*(run.batches(size=20) for run in runs), strict=True)
    for n, batches in enumerate(turns):
        for batch in batches:
            with writing(engine) as connection:
                store_batch(connection, batch, received_at=time[0])
        time[0] += 0.5
        worker.sweep()
        if ends.get(n) == "stopped":
            worker.stop()
            worker = start()
        elif ends.get(n) == "killed":
            with engine.begin() as connection:
                connection.execute(update(schema.server).values(until=0.0))
            worker = start()
    worker.stop()
    with reading(engine) as connection:
        return {
            t.name: [tuple(row) for row in connection.execute(select(t).order_by(*t.primary_key))]
            for t in (schema.alert, schema.alert_event, schema.check, schema.comparison)
        }


@pytest.fixture(scope="module")
def undisturbed(engines):
    found = evaluated(engines(), RUNS, {})
    assert {row[2] for row in found["alert"]} >= {"desync.gradients", "loss.nonfinite"}
    return lambda: found  # hypothesis would print it


@settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    ends=st.dictionaries(st.integers(0, 15), st.sampled_from(["stopped", "killed"]), max_size=5),
    often=st.booleans(),
)
def test_a_server_that_ends_changes_nothing_that_is_stored(
    engines, undisturbed, monkeypatch, ends, often
):
    monkeypatch.setattr(run_evaluation, "_SNAPSHOT_WORK_S", 0.0 if often else 1e9)
    monkeypatch.setattr(run_evaluation, "_SNAPSHOT_SHARE", 0.0)
    assert evaluated(engines(), RUNS, ends) == undisturbed()


def test_a_snapshot_is_gone_on_from(engines, monkeypatch):
    engine = engines()
    pages = []
    page = run_evaluation.RunEvaluation._take
    monkeypatch.setattr(
        run_evaluation.RunEvaluation,
        "_take",
        lambda self, row, data, *rest: (pages.append(data.columns), page(self, row, data, *rest)),
    )
    found = evaluated(engine, RUNS, {9: "stopped"})
    read = sum(len(part.steps) for columns in pages for part in columns)
    again = evaluated(engines(), RUNS, {})
    assert found == again
    twice = sum(len(part.steps) for columns in pages for part in columns)
    assert twice == 2 * read  # nothing was read again after the stop


def test_a_snapshot_of_other_code_is_left_alone(engines, monkeypatch, undisturbed):
    engine = engines()
    versions = iter(f"{n:032x}" for n in range(10_000))
    monkeypatch.setattr(snapshot, "version", lambda: next(versions))
    assert evaluated(engine, RUNS, {5: "stopped", 9: "killed"}) == undisturbed()


class Sly:
    def __reduce__(self):
        return subprocess.Popen, (["false"],)


def named(module, name):
    return f"c{module}\n{name}\n(S'false'\ntR.".encode()


@pytest.mark.parametrize(
    "pickled",
    [
        pickle.dumps(Sly()),
        named("os", "system"),
        named("builtins", "eval"),
        named("rankscope.server.demo.processes", "Process"),
        named("numpy", "load"),
        b"\x80\x04\x8c\x21rankscope.server.evaluation.align\x8c\x0cpartial.func\x93.",
        pickle.dumps({"a": 1})[:-2],
    ],
)
def test_bytes_that_name_anything_else_are_refused(pickled):
    with pytest.raises(snapshot.Unreadable):
        snapshot.from_bytes(zlib.compress(pickled))


def test_what_is_no_snapshot_is_refused():
    with pytest.raises(snapshot.Unreadable):
        snapshot.from_bytes(b"no such thing")


def test_a_state_that_is_too_large_is_not_kept():
    random = np.random.default_rng(0)
    assert snapshot.to_bytes([random.random(100_000) for _ in range(60)]) is None
    assert snapshot.to_bytes([random.random(1000)]) is not None
