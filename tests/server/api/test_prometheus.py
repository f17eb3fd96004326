"""`/metrics`: what Prometheus reads of a server and of its runs."""

import re
import time

import pytest

from rankscope.server.storage.reading import statistics
from tests.support.alert_rows import add_run, put_alert

# The text format: `name{label="value",...} number`, where a value escapes \, " and line feeds.
LABEL = r'[a-z_]+="(?:[^"\\\n]|\\["\\n])*"'
SAMPLE = re.compile(rf"(rankscope_[a-z_]+)(?:\{{({LABEL}(?:,{LABEL})*)\}})? (\S+)")
UNESCAPED = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


def read(client):
    """Name -> labels -> value; each sample after the type of its metric, and once."""
    found, types = {}, {}
    for line in client.get("/metrics").text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in types
            types[name] = kind
            found[name] = {}
        elif not line.startswith("# HELP "):
            name, labels, value = SAMPLE.fullmatch(line).groups()
            assert types[name] == ("counter" if name.endswith("_total") else "gauge")
            given = tuple(
                (label, re.sub(r"\\.", lambda m: UNESCAPED[m[0]], text))
                for label, text in re.findall(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', labels or "")
            )
            assert given not in found[name]
            found[name][given] = float(value)
    return found


@pytest.fixture
def engine(app):
    return app.state.engine


def labels(run, project="default", **more):
    return tuple({"run": run, "project": project, **more}.items())


def test_a_running_run_has_its_step_and_its_alerts_by_kind(client, engine):
    now = time.time()
    add_run(engine, 1, "otter", now=now)
    add_run(engine, 2, "heron", "birds", now=now)
    put_alert(engine, "a", kind="rank.straggler")
    put_alert(engine, "b", kind="rank.straggler")
    put_alert(engine, "c", kind="loss.spike", severity="critical", run=2)
    # A root is as grave as what follows from it, which is none by itself.
    put_alert(engine, "d", kind="desync.parameters", severity="warning")
    put_alert(engine, "e", kind="loss.diverging", severity="critical", parent="d")
    put_alert(engine, "f", kind="lr.too_high", state="resolved", resolved_at=now)
    found = read(client)
    assert found["rankscope_run_last_step"] == {labels("otter"): 100, labels("heron", "birds"): 100}
    seen = found["rankscope_run_last_seen_timestamp_seconds"][labels("otter")]
    assert seen == pytest.approx(now, abs=0.01)
    assert found["rankscope_run_alerts_open"] == {
        labels("otter", kind="rank.straggler", severity="warning"): 2,
        labels("otter", kind="desync.parameters", severity="critical"): 1,
        labels("heron", "birds", kind="loss.spike", severity="critical"): 1,
    }
    assert found["rankscope_runs_left_out"] == {(): 0}


def test_a_run_that_ended_goes_after_a_while(client, engine):
    now = time.time()
    add_run(engine, 1, "just", now=now - 60, state="failed")
    add_run(engine, 2, "long", now=now - 3600, state="failed")
    add_run(engine, 3, "silent", now=now - 3600)
    found = read(client)["rankscope_run_last_step"]
    assert set(found) == {labels("just"), labels("silent")}


def test_names_with_quotes_are_read_as_they_are(client, engine):
    name = 'a "quoted" \\ run\n'
    add_run(engine, 1, name, "ü{}=,")
    assert read(client)["rankscope_run_last_step"] == {labels(name, "ü{}=,"): 100}


def test_there_are_only_so_many(client, engine):
    now, many = time.time(), statistics._MOST_RUNS + 7
    for key in range(1, many + 1):
        add_run(engine, key, f"run-{key}", now=now + key)
    found = read(client)
    names = {dict(given)["run"] for given in found["rankscope_run_last_step"]}
    # The newest.
    assert names == {f"run-{key}" for key in range(8, many + 1)}
    assert found["rankscope_runs_left_out"] == {(): 7}
    assert found["rankscope_runs"][(("state", "running"),)] == many
